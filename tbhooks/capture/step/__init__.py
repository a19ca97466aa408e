"""What happens at the ends of backward passes and optimizer steps: counting, weights, gradients, updates."""
