"""Programs that commtrace traces: ordinary trainings that know nothing of the tracer.

Each subpackage runs on its own, with ``python -m`` under any launcher::

    torchrun --nproc_per_node 2 -m examples.gpt_neox.train demo.yml
"""
