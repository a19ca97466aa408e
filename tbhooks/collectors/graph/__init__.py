"""The model graph of one pass, for TensorBoard's GRAPHS tab."""
