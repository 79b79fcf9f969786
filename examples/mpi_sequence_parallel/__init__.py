"""A Transformer layer whose input is divided along the sequence, over MPI (torch and mpi4py).

    mpiexec -n 4 python -m examples.mpi_sequence_parallel --attention ring
    python -m examples.mpi_sequence_parallel.scaling

After transformer-sequence-parallelism by Harshita M.P. and Art Zabarov, whose configuration is
`--hidden 5120 --heads 40 --sequence 4096 --batch 4 --iterations 10 --forward-only`. Additions: the backward pass, two
other ways to share the attention, and CUDA-aware MPI, NCCL and gloo besides copies through host memory.
"""
