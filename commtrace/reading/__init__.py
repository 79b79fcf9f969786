"""From files to a run that can be asked: whatever the log went through, what is left of it is read."""
