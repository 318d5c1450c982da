"""What ranks exchange, when, with whom, in which encoding, and over what."""
