"""The records of one logged step, from the device to a frame: its buffers, the one copy, and what is copied with it."""
