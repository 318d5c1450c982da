"""The schedules: when workers exchange."""
