"""Analyses of what ranks do with each other: which calls belong together, whose clock says what, who waits for whom."""
