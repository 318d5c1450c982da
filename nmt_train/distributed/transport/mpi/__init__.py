"""Messages over MPI."""
