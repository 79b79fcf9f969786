"""The commands, one module each; `commtrace.cli` lists them."""
