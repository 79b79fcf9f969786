"""Train a stack of the original Transformer's encoder layers, divided among MPI ranks in one of three ways.

    mpiexec -n 4 python -m examples.mpi_encoder --parallel tensor
    mpiexec -n 4 python -m examples.mpi_encoder --parallel pipeline --schedule 1f1b --micro-batches 5
    python -m examples.mpi_encoder.scaling

After "Parallelizing Transformer with Model, Tensor Model and Pipeline Parallelism" by Yadi Xiao and Hao Ren, whose
configuration is the default (model 512, hidden 2048, batch 10, 8 heads). Additions: backward through attention, deep
stacks, pipelines, and more workers than heads.
"""
