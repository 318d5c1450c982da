"""What a run leaves on disk, and how it counts."""
