"""Example programs and studies; they run from a checkout and are not part of the package.

* `gpt_neox`: GPT-NeoX-style training with DeepSpeed, DDP and FSDP, without any code for tracing
* `mpi_encoder`, `mpi_sequence_parallel`: two Transformers over mpi4py; `mpi_common` is their shared code
* `paper_study`: the experiments of a paper, repeated and compared with theory
* `demo`: the same small model under DDP and ZeRO, traced and reported

    torchrun --nproc_per_node 2 -m examples.gpt_neox.train demo.yml
"""
