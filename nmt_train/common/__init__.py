"""Helpers that all subpackages use: errors, durations and files."""
