"""Optimizers over a flat vector of parameters."""
