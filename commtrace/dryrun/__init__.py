"""Dry runs (`commtrace dryrun`): an unchanged training program runs as any rank of a job of any size, on one machine.

What a program communicates does not depend on the numbers that it computes. Tensors therefore have addresses but no
memory (`untouched_memory`, `dispatch_mode`), and collectives send nothing (`collectives`, `fake_groups`). Everything
else is real: the program, torch, DeepSpeed, autograd, and the recording hooks. Examples and limits are in
docs/how-to/dry-run.md.

    dry_run                        the ranks of `--ranks` (without it: rank 0), and their log
    distinct_ranks                 the search of `--ranks all-distinct`
    rank_processes                 processes of simulated ranks, and of ranks whose messages they need
    rank_messages                  small values of sends, broadcasts and scatters
    isolation/                     what the program writes does not reach the user's files
    simulation                     this process becomes a rank: installs the modules below
    dispatch_mode                  what each operator does, and values that the program reads (`.item()`)
    operators                      kinds of operators, from their schemas
    untouched_memory, storage_set  tensors without memory
    collectives, fake_groups       collectives that send nothing, in groups of one process: small results are
                                   as if all ranks sent the same
    simulated_cuda, cuda_autocast  devices
    torch_functions, checkpoint_patches, deepspeed_patches, inert    functions of libraries that are no operators
    notices                        lines of the program that need what a dry run does not have
    flops                          floating-point operations between the calls
    simulated_log                  the log of a rank, marked and without times
"""
