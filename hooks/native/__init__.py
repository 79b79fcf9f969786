"""The native recorder: the kernels of hooks/torch/kernels.py once more, in C++, for a thirtieth of their cost or less.

Everything above the kernels is shared with the portable recorder: settings, session, ring, tables, drain, log. Python
still numbers rows of tables (`rows`), and keeps progress, jobs and roles; C++ asks it once per row.

    module.cpp     what Python calls
    kernels.*      the kernels, and the ends that futures show
    waits.*        waits and coalesced calls that Python makes
    recording.h    one recording: groups, kinds, counters
    plan.h         what an operator's arguments mean, and its payload
    callsites.h    the line that made a call; frames.* read a thread's frames without the GIL
    works.h        which records a wait is about
    device.*       times of calls on a device (docs/how-to/device-times.md): what is measured, and when it is read
    device_events.*  one device: its streams, its capture, its events
    device_clock.h   where its times lie on the host's clock
    slots.h        records, and who may write to them
    python.h       how Python is asked
"""
