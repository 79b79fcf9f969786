"""Comparison of the recorded calls of a run with those that were expected, whoever expects them.

An expected run is a run of calls (`run_calls`), whether rules expect it (`expected_run`) or it was recorded: a dry run,
an accepted run, another run (`recorded_calls`) or a baseline file (`baseline`). Calls are matched step by step
(`step_matching`), in their order where it is known, else by cells; differences get causes (`causes`). Equal ranks and
steps are compared once (`comparison`). All comparisons end in one verdict (`verdict`, `verdict_text`); those with rules
also have the tables of a report (`rule_comparison`).
"""
