"""One file per command; `commtrace.cli` has the table of them."""
