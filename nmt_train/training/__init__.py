"""How a rank trains: startup, coordination with the other ranks, checkpoints and recovery."""
