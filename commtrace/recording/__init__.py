"""Recording: from a hooked call to records in the log directory. Imported by every traced process."""
