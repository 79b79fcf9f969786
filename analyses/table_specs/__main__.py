"""Prints the reference page of all tables, in Markdown."""

from . import to_markdown

print(to_markdown(), end="")
