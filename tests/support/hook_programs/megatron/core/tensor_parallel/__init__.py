"""A stand-in for Megatron-Core, with the names that hooks look for."""
