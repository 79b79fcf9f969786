"""The native recorder: the kernels of hooks/torch/recording_kernels.py in C++ (cost: docs/explanation/benchmarks.md).

Everything above the kernels is shared with the Python recorder: settings, session, ring, tables, drain, log. Python
still numbers the rows of tables (`rows`) and keeps progress, jobs and roles; C++ looks up each row once.

    libraries              the two compiled libraries
    compiled_kernels       whether and how the recorder of torch.distributed is installed
    rows, native_slots     table rows that C++ looks up; the slots of the ring
    compiled_wrappers, mpi.cpp    compiled wrappers of mpi4py's methods, in a separate library without torch

    module.cpp             the functions that Python calls
    recording_kernels.h    the kernels: phase, peer, tag and number of a record; ends of calls shown by futures
    waits.h                waits and coalesced calls that Python makes
    markers.h              functions of libraries whose calls a hook marks with a purpose or a phase
    recording.h            one recording: begin of records (dropped without a slot), groups, kinds, counters
    plan.h                 positions of an operator's arguments, and its payload
    callsites.h            call sites; frames.* read a thread's frames without the GIL
    works.h                the calls that a wait ends
    device.h               times of calls on a device, none under capture; when its clock is sampled
                           (docs/explanation/device-times.md)
    device_events.h        a device: streams, whether one is under capture, events
    device_clock.h         conversion of a device's times to the host's clock
    record.h               the record of a call, as commtrace.schema.RECORD
    slots.h                the slots of a ring, and exclusive access to their records
    progress.h             step, micro-batch and phase, shared with Python
    python.h               row lookups in Python
"""
