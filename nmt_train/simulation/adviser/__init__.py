"""Advises which mode to use: compares all modes on a cluster, by words/s and by the words that each needs."""
