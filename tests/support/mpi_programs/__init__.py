"""Programs that communicate with mpi4py."""
