"""Hooks for PyTorch.

hook, recording_kernels, dispatcher   calls: kernels that run before torch's
tracer, c10d_operators                calls: their records, and the meaning of arguments
backend_methods                       direct calls of backend objects
works, call_ends                      ends of calls
process_groups, group_registry,       groups and their roles
  mesh_roles
training, dtensor, fsdp2,             steps and marked phases (others: `hooks.call_context`), and hooks for
  pipelining                          torch's parallel libraries
captured_jobs, ddp_job, fsdp_job,     rows of the job table: settings that determine communication
  dtensor_job, model_facts
recomputation, redistribution,        purposes of calls (fsdp2, pipelining: those of FSDP2 and pipelines; tracer: those
  fsdp1, batch_norm, expert_dispatch,   of DDP's reducer in C++; training: those of its communication hooks in Python)
  entry_points
passes                                rows of the passes table: what ran in each step
scheduled_stages                      rows of the stages table: what pipeline stages send
blind_spot_warnings                   warnings about calls that are not recorded
"""
