"""torch.compile: what is traced into graphs, and when a compiled model is compiled again."""
