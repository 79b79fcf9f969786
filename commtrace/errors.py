"""Errors that commtrace raises. Each message names the file or setting, the value, and what to do about it."""

from __future__ import annotations


class CommtraceError(Exception):
    """An error that the user can fix. The command line prints its message in one line and returns status 1."""


class SettingsError(CommtraceError):
    """A COMMTRACE* variable has a value that makes no sense."""


class LogError(CommtraceError):
    """There is no log here that can be read. A log that is only damaged raises nothing: it carries notes."""


class NewerLogError(LogError):
    """The log was written by a later version of commtrace, in a format that this one does not know."""


class NoSuchTableError(CommtraceError):
    """A table was asked for by a name that no analysis has."""


class NoSuchFigureError(CommtraceError):
    """A figure was asked for that is not known, or that this log has nothing to draw from."""


class OutputError(CommtraceError):
    """A result could not be written."""


class MissingLibraryError(CommtraceError):
    """An optional library is needed for this."""


class LaunchError(CommtraceError):
    """The launcher's environment does not say enough to find the other processes, or there is no launcher."""


class ConfigError(CommtraceError):
    """A setting of a model's configuration is missing, has a wrong value, or asks for what is not supported."""
