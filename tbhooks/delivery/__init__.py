"""The background thread that turns packed steps into frames and hands them to the sinks."""
