"""Weights, their gradients and their updates, read around the optimizer's step."""
