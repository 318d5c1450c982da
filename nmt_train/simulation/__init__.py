"""A simulated cluster: its clock, its network, and the tool around it."""
