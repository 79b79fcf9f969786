"""Errors that commtrace raises, and warnings. A message names the file or setting and the value, and the fix."""

from __future__ import annotations

import sys


class CommtraceError(Exception):
    """An error that the user can fix. The command line prints its message in one line and returns status 2."""


class SettingsError(CommtraceError):
    """A COMMTRACE* variable has an invalid value."""


class LogError(CommtraceError):
    """There is no readable log. A damaged log is not an error: `Run.notes` describes the damage."""


class NewerLogError(LogError):
    """The log has a newer format than this version of commtrace can read."""


class ImportFileError(CommtraceError):
    """A file of another tool cannot be imported."""


class NoSuchTableError(CommtraceError):
    """No analysis has a table of this name."""


class NoSuchFigureError(CommtraceError):
    """No figure has this name, or the log has no data for it."""


class OutputError(CommtraceError):
    """An output file cannot be written."""


class MissingLibraryError(CommtraceError):
    """An optional library is not installed."""

    @classmethod
    def of_extra(cls, feature: str, library: object, extra: str, alternative: str = "") -> MissingLibraryError:
        """Return the error of a feature whose library an extra of commtrace installs; `alternative`: other help."""
        return cls(f"{feature}: needs {library}; pip install 'commtrace[{extra}]'{alternative}")


class ClusterError(CommtraceError):
    """A Dask cluster cannot be reached, lacks memory or workers, or has another version of commtrace."""


class LaunchError(CommtraceError):
    """The launcher's variables do not say where the other processes are, or no launcher is installed."""


class ConfigError(CommtraceError):
    """A setting of a model configuration is missing, has an invalid value, or is not supported."""


def warn(message: str) -> None:
    """Print a line on stderr; never on stdout, which belongs to the program."""
    try:
        print(f"commtrace: {message}", file=sys.stderr, flush=True)
    except Exception:
        pass  # stderr is closed, or the program replaced it with an object that raises
