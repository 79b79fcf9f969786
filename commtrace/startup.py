"""Start-up: switches tracing on at interpreter start, before the program runs.

`commtrace.pth` imports this module in every interpreter whose environment has COMMTRACE set; `commtrace run` imports it
through a `sitecustomize`. It uses little of the standard library and nothing else, because it also runs in every helper
process. Only the program imports the traced libraries; a hook is installed when the import of its library ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

from commtrace.errors import CommtraceError, warn
from commtrace.hook_table import HOOKS, OLDEST, PACKAGE, SIMULATIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from commtrace.settings import Settings


_installed: list[str] = []
_registered: list[bool] = []
_threads_followed: list[Callable[[], None]] = []


def activate() -> None:
    """Switch tracing on if the environment says so. Never raises: tracing must not make a program fail."""
    try:
        if os.environ.get("COMMTRACE", "0") in ("", "0"):
            return
        from commtrace import settings

        _switch_on(settings.from_environment(os.environ))
    except Exception as error:
        reason = error if isinstance(error, CommtraceError) else f"cannot start: {type(error).__name__}: {error}"
        _warn_once(f"{reason}. The program goes on untraced.")


def start(directory: str | os.PathLike[str] = "commtrace-logs") -> None:
    """Start recording in this process, as COMMTRACE=directory in the environment does at process start.

    Args:
        directory: Log directory, created at the first communication call.

    Raises:
        CommtraceError: Tracing is already on, or a COMMTRACE_* variable has an invalid value.
    """
    from commtrace import settings
    from commtrace.recording.session import session

    if session.settings is not None:
        raise CommtraceError(f"tracing is already on ({session.settings.directory}); call commtrace.stop() first")
    _switch_on(settings.for_directory(directory, os.environ))


def stop() -> None:
    """Write all records, close the log and remove every hook. Does nothing while tracing is off."""
    from commtrace.recording.session import session

    session.end("stop")
    _follower.wanted.clear()
    if _follower in sys.meta_path:
        sys.meta_path.remove(_follower)
    while _threads_followed:
        _threads_followed.pop()()
    while _installed:
        import_module(_installed.pop()).uninstall()


def _switch_on(settings: Settings | None) -> None:
    from commtrace.recording.session import session

    if settings is None or session.settings is not None:
        return  # off, or already on: a .pth line may run twice in one interpreter
    session.settings = settings
    if not _registered:
        _registered.append(True)
        # Registered before the exit functions of libraries, so it runs after them: their calls are recorded.
        atexit.register(session.end, "exit")
        os.register_at_fork(after_in_child=session.forked)
    if not _threads_followed:
        from commtrace.recording.thread_exceptions import follow_threads

        _threads_followed.append(follow_threads())
    if settings.simulated:
        _follower.wanted.update(dict.fromkeys(SIMULATIONS, ""))  # those of libraries without a hook
    _follower.wanted.update(HOOKS)
    if _follower not in sys.meta_path:
        sys.meta_path.insert(0, _follower)
    for library in HOOKS:
        if library in sys.modules:
            _follower.imported(library)


class _ImportFollower:
    """A meta-path finder that installs the hook of a library when its import ends. Other finders locate the library."""

    def __init__(self) -> None:
        self.wanted: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.wanted:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(name, spec)
                    return spec
        return None

    def _follow(self, name: str, spec: ModuleSpec) -> None:
        # Replace the method of this loader object only, because other code depends on the loader's class.
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None or isinstance(loader, type):
            return

        def exec_module(module: ModuleType) -> None:
            original(module)
            self.imported(name)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            _warn_once(f"cannot follow the import of {name}; its calls are not traced.")

    def imported(self, name: str) -> None:
        """Install the hook of a library whose import has ended."""
        from commtrace.recording.session import session

        hook = self.wanted.pop(name, None)
        if hook is None:
            return
        text = too_old(name)
        if text:
            _warn_once(text)
            import_module(f"{PACKAGE}.recorder_setup").blind_spots[f"version of {name}"] = [text]
        try:
            if hook:
                import_module(hook).install()
                _installed.append(hook)
        except Exception as error:
            _warn_once(f"cannot hook {name}: {type(error).__name__}: {error}. Its calls are not traced.")
        if name in SIMULATIONS and session.settings is not None and session.settings.simulated:
            import_module(SIMULATIONS[name]).install()
            _installed.append(SIMULATIONS[name])


def too_old(library: str) -> str:
    """Return a warning if a library is older than its oldest supported version, else ""."""
    oldest = OLDEST.get(library)
    package = library.partition(".")[0]
    version = str(getattr(sys.modules.get(package), "__version__", ""))
    parts = version.split(".")[:2]
    if oldest is None or not all(part.isdigit() for part in parts) or tuple(map(int, parts)) >= oldest:
        return ""
    return f"{package} {version} is not supported, only {'.'.join(map(str, oldest))} and later: calls may be missing"


_follower = _ImportFollower()
_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warn(message)


activate()
