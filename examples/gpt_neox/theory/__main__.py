"""Run a command of commtrace with the rules of this example: `python -m examples.gpt_neox.theory COMMAND ...`."""

from __future__ import annotations

import sys

from commtrace.cli import main

from . import register

if __name__ == "__main__":
    register()
    sys.exit(main())
