"""The part of the study that is about time: real ranks of this machine, small shapes.

points      what is trained, and how often
messages    a program: messages between ranks that do nothing else
machine     how busy the machine was meanwhile
measured    from the logs to tables
receives    receives of a pipeline, one by one: waiting for the sender, and the transfer
verdicts    what the paper states, and what the tables say of it
words       what else they say
figures     what they show
part        experiments and sections, for the command
"""
