"""A sharded parameter server."""
