"""What every room of the house uses: errors, durations, files."""
