"""A stand-in for torchtitan, with the names that hooks look for."""
