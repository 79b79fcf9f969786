"""Hooks for PyTorch.

calls
    hook, dispatcher     installation at the dispatcher
    recording_kernels    the kernels that run before torch's
    c10d_operators       the meaning of an operator's arguments: payload, own share, peer, tag
    tracer               their records; the purpose of calls of DDP's reducer in C++
    backend_methods      direct calls of backend objects
    works                waits and polls, which observe the ends of calls
    call_ends            pending calls by Work, tensor or batch of coalesced calls: when, and with which state, their
                         record ends, also without a wait
    blind_spot_warnings  warnings about calls that are not recorded
groups
    process_groups       their rows
    group_registry       their roles, as libraries keep and pass them
    mesh_roles           dimensions of a DeviceMesh whose group does not name them
steps, and torch's parallel libraries
    training             DDP and plain torch: steps, which last until `optimizer.step()` (also under `no_sync`: there
                         are no micro-batches), and purposes of communication hooks in Python
    fsdp2, pipelining    FSDP2 and pipelines: phases, micro-batches and purposes
    dtensor              how `parallelize_module` parallelizes a model
    passes               rows of the passes table: what ran in each step
    expert_routing       rows of the experts and routing tables: tokens that layers with experts sent in each step
    step_rows            what both have in common: a row for a step that differs from the one before
    scheduled_stages     rows of the stages table: what pipeline stages send
purposes of other calls
    fsdp1, batch_norm, expert_dispatch, recomputation
    autograd_functions   tensor-parallel layers of libraries
    marked_batches       messages between stages of libraries, also in batches that serve both directions
    redistribution       DTensor, with placements and the module
    entry_points         functions with one purpose, whatever they call: gradient norms, checkpoints, the loss
rows of the job table: settings that determine communication
    captured_jobs, ddp_job, fsdp_job, dtensor_job, model_facts
"""
