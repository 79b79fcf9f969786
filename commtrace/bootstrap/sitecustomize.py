"""Switches tracing on where no `commtrace.pth` is read: `commtrace run` puts this folder at the front of PYTHONPATH.

Python imports the first `sitecustomize` that it finds and no other, so this one runs the program's own after itself.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _run_the_other_one() -> None:
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.environ.get("COMMTRACE", "0") not in ("", "0"):
        import commtrace.startup  # noqa: F401
except Exception as error:  # tracing is never the reason why a program fails
    print(f"commtrace: cannot start: {error}. The program goes on untraced.", file=sys.stderr)

_run_the_other_one()
