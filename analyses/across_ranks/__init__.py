"""Analyses across ranks: matched calls, aligned clocks, waits, critical paths, stuck calls."""
