"""Hooks of PyTorch.

hook, recording_kernels, dispatcher, tracer, c10d_operators  the calls: kernels before torch's, and what arguments mean
works, call_ends                                   the ends of calls
process_groups, group_registry                     groups and their roles
training, dtensor, fsdp                            steps and phases, and hooks of torch's parallel libraries
captured_jobs, *_job, model_facts                  rows of the job table: what decides the communication
passes                                             rows of the passes table: what ran in each step
"""
