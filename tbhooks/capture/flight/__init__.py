"""The flight recorder: a few numbers of every step in a ring on the device, which is copied when something happens."""
