"""A tensor to one row of statistics and its bucket counts: in C, with torch operations, and with Triton."""
