"""A run while it is recorded: what was read is not read again, and incidents are found once.

followed_run    a run as of its last reading: totals of all records, times of its last steps, hangs, ends
incidents       what `commtrace watch` tells: hangs, ends, stragglers, long steps
metrics         its numbers by step, and the present ones, for TensorBoard and Prometheus
dashboard       a dashboard of Grafana for the latter
screen          the lines that `commtrace top` shows
state           the same as a JSON document
"""
