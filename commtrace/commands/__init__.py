"""The commands, one file each; `commtrace.cli` has the table of them."""
