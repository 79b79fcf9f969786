"""Comparison of the recorded calls of a run with those that were expected, whoever expects them.

An expected run is a run of calls, whether rules expect it or it was recorded: a dry run, an accepted run, another run,
a baseline file. Calls are compared exactly, without a threshold. In the order of the work:

run_calls, call_keys            calls of a run by rank and step, and when two calls are equal
recorded_calls, counted_calls, baseline, rules_run    their sources: a log, in order or counted; a file; rules
own_calls                       which calls are the program's own
step_pairs                      which steps of two recorded runs are compared
step_matching, step_differences  the calls of one step of one rank: matched in order or by cells, and what differs
compared_ranks                  all ranks and steps, equal ones once
causes, setting_differences     why calls differ
verdict, verdict_text           the result of every comparison: which differences do not count (own calls, evaluations,
                                steps in which a process ended); its text
two_runs                        two runs of recorded calls (a dry run, an accepted run, a baseline, another run)
rules_analysis, rules_tables    a recorded run and the calls that rules expect: the analysis and its tables
rules_verdict                   the verdict on it: with what was lost or is missing (status: commands/exit_status)
step_by_purpose                 the typical step by purpose and place, beside closed forms
waterfall, theory_specs, theory_section    from the closed form to the recorded bytes; what a report shows
"""
