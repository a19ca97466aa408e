"""Collectors: what is recorded on logged steps besides statistics, with one file each.

The protocol is `tbhooks.capture.hooks.collectors.Collector`.
"""
