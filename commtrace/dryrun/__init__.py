"""Dry runs (`commtrace dryrun`): an unchanged training program runs as any rank of a job of any size, on one machine.

What a program communicates does not depend on the numbers that it computes. Tensors therefore have addresses but no
memory (`untouched_memory`, `dispatch_mode`), and collectives send nothing (`collectives`, `process_groups`). Everything
else is real: the program, torch, DeepSpeed, autograd, and the recording hooks. Examples and limits are in
docs/how-to/dry-run.md.
"""
