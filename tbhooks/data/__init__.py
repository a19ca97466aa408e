"""The vocabulary that all layers share: frames, sites, findings, statistics, errors. No torch, no I/O."""
