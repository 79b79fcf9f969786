"""The time part of the study: real ranks of this machine, small models.

trainings       what is trained, and how often
bare_messages   a program: messages between ranks that do nothing else
machine_load    processor time of other programs
time_tables     from the logs to tables
receives        receives of a pipeline: waiting for the sender, and the transfer
time_claims     the paper's statements and their verdicts
time_figures    figures
time_part       experiments and sections
"""
