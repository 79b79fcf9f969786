"""Comparison of the recorded calls of a run with those that were expected, whoever expects them.

An expected run is a run of calls, whether rules expect it or it was recorded: a dry run, an accepted run, another run,
a baseline file. Calls are compared exactly, without a threshold. In the order of the work:

run_calls, call_keys            calls of a run by rank and step, and when two calls are equal
expected_run, recorded_calls, counted_calls, baseline    their sources
own_calls                       which calls are the program's own
step_pairs                      which steps of two runs are compared
step_matching, step_comparison  the calls of one step of one rank: matched in order or by cells, and what differs
comparison                      all ranks and steps, equal ones once
call_differences                two recorded runs: their differences as a table
causes, settings                why calls differ
verdict, verdict_text           the result of every comparison; rules_verdict: of those with rules
reconciliation, rule_comparison, waterfall    tables of the comparison with rules; theory_section shows them
"""
