"""A parameter server in shards."""
