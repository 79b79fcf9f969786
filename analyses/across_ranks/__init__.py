"""Analyses across ranks.

    matching                       which calls of different ranks are one operation
    dependencies                   which of them wait for which
    clocks, clock_alignment, aligned_clock, corridors, clock_tables    the clocks of the hosts, from the calls alone
    call_times                     the model: arrival, release, end, wait and transfer of each call
    blocked_time                   the model of ranks: when calls block them; begin and end of steps
    wait_tables                    sums of waits and transfers, for the tables `waits_by_...`
    critical_paths, stragglers     what the end of a step depends on; whom others wait for, and where its delay began
    endings                        how each process ended, and which one ended first
    last_calls, stuck_calls, disagreements    hung and dead jobs
    stalls                         what ranks that make no progress are doing
    step_time_section, step_time_specs, stuck_calls_section, endings_section    what reports show of these subjects

The parts are listed in the order of the work.
"""
