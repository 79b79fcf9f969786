"""Readers of log directories: runs and their event tables. Damaged logs are read as far as possible."""
