"""The table of modes, and the code that makes a plan, and then a strategy, from its rows."""
