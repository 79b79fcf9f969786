"""Build the native recorder for this environment.

It records calls at a fraction of the cost of the Python recorder, and observes
the end of a call even if nothing in Python waits for it. A binary wheel of
commtrace holds it for the releases of torch on PyPI: then nothing is built.
Otherwise the build needs a C++ compiler and takes half a minute, once per
environment (Python, torch, commtrace). The result is stored in the user's cache
(XDG_CACHE_HOME), where every training run finds it. Without it, the Python
recorder is used.
"""

from __future__ import annotations

import argparse
import importlib.util


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command takes none."""


def run(arguments: argparse.Namespace) -> int:
    """Build the recorders of the installed libraries, and print their paths."""
    from commtrace.hooks.native import libraries

    print(libraries.MPI.build())
    if importlib.util.find_spec("torch") is not None:
        print(libraries.TORCH.build())
    return 0
