"""Comparison of the recorded calls of a run with those that were expected, whoever expects them.

Rules expect the calls of a job (`reconciliation`); a dry run, an accepted run, its baseline file and another run are
runs themselves (`call_differences`).
"""
