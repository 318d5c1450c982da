"""A simulated cluster: its clock, its network, and the code of `nmt-simulate`."""
