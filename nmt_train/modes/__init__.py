"""The table of modes, and what is built from its rows."""
