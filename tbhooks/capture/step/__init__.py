"""A training step: when it ends, its states, and what happens around backward passes and optimizer steps."""
