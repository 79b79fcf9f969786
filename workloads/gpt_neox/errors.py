"""What can go wrong before training starts, in words that say what to change."""

from __future__ import annotations


class WorkloadError(Exception):
    """The training cannot start as it was asked for; the message says what to change."""


class ConfigError(WorkloadError):
    """A setting is missing, has a wrong value or asks for something that this trainer does not do."""


class DataError(WorkloadError):
    """The training text is missing or too short."""


class LaunchError(WorkloadError):
    """The launcher's environment does not say enough to find the other processes."""
