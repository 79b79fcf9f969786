"""`commtrace dryrun`: a training program, unchanged, as any rank of a job of any size, on one machine.

What is communicated does not depend on the numbers that are computed. So tensors have addresses and no memory
(`untouched_memory`, `dispatch_mode`), collectives go nowhere (`collectives`, `process_groups`), and everything else is
real: the program, torch, DeepSpeed, autograd, and the hooks that record. A worked example, and what it cannot do:
docs/how-to/dry-run.md.
"""
