"""`commtrace build`."""

from __future__ import annotations

import argparse
import importlib.util


class Command:
    """Build the native recorder for this environment.

    Recording a call then costs less than a microsecond, and ends are seen even where nothing in Python waits for them.
    It takes half a minute and a C++ compiler, once per environment (Python, torch, commtrace); the result lies in the
    user's cache (XDG_CACHE_HOME), where every training finds it. Without it, the Python recorder does the same work.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Build what there is a library for, and say where it is."""
        from commtrace.hooks.native import mpi_library

        print(mpi_library.build())
        if importlib.util.find_spec("torch") is not None:
            from commtrace.hooks.native import library

            print(library.build())
        return 0
