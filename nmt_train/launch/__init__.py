"""Launching ranks, and restarting a job that ended early."""
