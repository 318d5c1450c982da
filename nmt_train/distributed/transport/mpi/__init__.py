"""The transport over MPI."""
