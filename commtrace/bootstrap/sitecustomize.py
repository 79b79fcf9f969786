"""Start-up for installations without `commtrace.pth`: `commtrace run` puts this folder at the front of PYTHONPATH.

Python imports only the first `sitecustomize` that it finds, so this one then runs the program's own.
"""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))


def _run_next_sitecustomize() -> None:
    other_folders = [path for path in sys.path if os.path.abspath(path or ".") != _folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", other_folders)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.environ.get("COMMTRACE", "0") not in ("", "0"):
        import commtrace.startup  # noqa: F401
except Exception as error:  # tracing must not make a program fail
    print(f"commtrace: cannot start: {error}. The program goes on untraced.", file=sys.stderr)

_run_next_sitecustomize()
