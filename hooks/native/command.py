"""`commtrace build`."""

from __future__ import annotations

import argparse

from commtrace.errors import CommtraceError


class Command:
    """Build the native recorder for this environment.

    Recording a call then costs less than a microsecond, and ends are seen even where nothing in Python waits for them.
    It takes half a minute and a C++ compiler, once per environment (Python, torch, commtrace); the result lies in the
    user's cache (XDG_CACHE_HOME), where every training finds it. Without it, the Python recorder does the same work.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Build it, and say where it is."""
        try:
            from .library import build
        except ImportError as error:
            raise CommtraceError(
                f"the native recorder is for PyTorch, which is not installed here ({error})"
            ) from error
        print(build())
        return 0
