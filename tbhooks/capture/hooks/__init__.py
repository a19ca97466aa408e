"""The hooks on modules, tensors and functions, and what they observe of one step."""
