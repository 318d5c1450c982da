"""Strategies, which turn a worker's gradients into new parameters together with the other ranks; their plan and their state."""
