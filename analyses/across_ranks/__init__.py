"""Analyses across ranks.

    matching             which calls of different ranks are one operation; the hosts of processes
    dependencies         which of them wait for which
    clock_alignment      the clocks of the hosts from the calls alone: which calls bound them, in which order of hosts
    aligned_clock, corridors    one host's clock from its bounds, with its error, jumps and contradictions
    clocks               the clocks of all hosts, as functions of time
    call_times           the model: arrival, release, end, wait and transfer of each call
    blocked_time         the model of ranks: when calls block them; begin and end of steps
    critical_paths       what the end of a step depends on; the parts of a step's time
    stragglers           whom others wait for, where its delay began, and from which size on that is told
    endings              how each process ended, in words and in order: which one ended first
    last_calls           the last calls of hung and dead jobs, matched
    stuck_calls          calls that do not end: from which duration on; who waits, who is absent
    disagreements        operations, sizes, types and roots in which the ranks of a stuck call differ
    stalls               what ranks that make no progress outside of calls are doing
    culprits             the ranks that a hang begins with, and how sure that is
    clocks_section, waits_section, step_time_section, step_time_specs, stuck_calls_section, endings_section    what
                         reports show of these subjects: tables, findings, warnings

The parts are listed in the order of the work.
"""
