"""Reading: from a log directory to a run and its event table. A damaged log is read as far as possible."""
