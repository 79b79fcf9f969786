"""The part of the study that is about time: real ranks of this machine, small shapes."""
