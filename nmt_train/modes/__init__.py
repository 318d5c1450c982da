"""The table of modes, and the code that builds training objects from its rows."""
