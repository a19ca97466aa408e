"""Trainings with one illness each, put in on purpose, and healthy ones: what the rules say about them."""
