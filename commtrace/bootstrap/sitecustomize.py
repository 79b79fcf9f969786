"""Start-up for installations without `commtrace.pth`: `commtrace run` puts this folder at the front of PYTHONPATH.

Python imports only the first `sitecustomize` that it finds, so this one then runs the program's own.
"""

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))

try:
    if os.environ.get("COMMTRACE", "0") not in ("", "0"):
        import commtrace.startup  # noqa: F401
except Exception as error:  # tracing must not make a program fail
    print(f"commtrace: cannot start: {error}. The program goes on untraced.", file=sys.stderr)

_other_folders = [path for path in sys.path if os.path.abspath(path or ".") != _folder]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _other_folders)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
