"""Replicas: every rank has all parameters, and all ranks exchange at the same step."""
