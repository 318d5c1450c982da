"""The files of a run, its progress counters and its stop conditions."""
