"""Dependencies: which calls of an operation cannot end before others of it have begun.

In an all_reduce, every rank waits for every other one; in a broadcast, for the root alone; a
receive waits for its send. So each call is a source (others wait for it), a target (it waits for
others), both, or neither. Calls are neither if it is not certain that bytes move: calls without
payload or share, uneven all_to_alls (two ranks may have nothing for each other), prefix reductions,
and calls without a known root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.operations import OPERATIONS, Extent, Flow
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import integer_or_none
from commtrace.schema import DEVICE_CLOCKS, Flag, State

from .matching import MatchedCalls

SOURCE: Final = 1
"""Bit of a call that others wait for."""
TARGET: Final = 2
"""Bit of a call that waits for others."""
UNCERTAIN: Final = 8
"""Bit of a call of an all_to_all in which some ranks may have nothing for each other."""
FAILED: Final = 4
"""Bit of a call that raised an exception."""
ON_DEVICE: Final = 16
"""Bit of a call whose end was observed on a device."""

_LARGEST_ERROR_NS: Final = 1 << 58
_UNEVEN_VARIANTS: Final = ("v", "w")
"""Last letters of MPI's all_to_alls whose shares may be empty; the recorder does not flag them."""


def clock_error_ns(process: Process) -> int:
    """Return by how much the device times of a process may be early on the host's clock."""
    error = integer_or_none((process.tables.stats or {}).get("device_clock_ns"))
    return min(max(error or 0, 0), _LARGEST_ERROR_NS)


def completions(run: RecordedRun, calls: MatchedCalls) -> Array:
    """Return when each call had certainly ended, ns, shape (calls,), 0 if not known.

    Device times may be early on the host's clock by an error that the recorder measures; it is added.

    Args:
        run: The run.
        calls: Its calls with the columns "end" (`call_times.ends`) and "depends" (`dependencies`).
    """
    errors = np.array([clock_error_ns(process) for process in run.processes], np.int64)
    late = ((calls["depends"] & ON_DEVICE) > 0) & (calls["end"] > 0)
    return np.asarray(calls["end"] + np.where(late, errors[calls["process"]], 0)) if late.any() else calls["end"]


def dependencies(block: RecordBlock) -> Array:
    """Return the bits SOURCE, TARGET, UNCERTAIN, FAILED and ON_DEVICE of each call, uint8, shape (n,)."""
    kinds, labels = block["kind"], block.labels
    pickled = (block["flags"] & int(Flag.OBJECT)) != 0
    moves = (block["payload"] > 0) | pickled
    share = (block["local"] > 0) | pickled
    even = (block["flags"] & int(Flag.UNEVEN)) == 0
    variants = labels.categories("variant").astype(str)
    may_be_empty = np.char.endswith(variants, _UNEVEN_VARIANTS[0]) | np.char.endswith(variants, _UNEVEN_VARIANTS[1])
    even &= ~(may_be_empty & (labels.categories("api").astype(str) == "mpi"))[kinds]
    root = block["peer"] == block["rank"]
    other = (block["peer"] >= 0) & ~root
    always, never = np.ones(len(block), bool), np.zeros(len(block), bool)
    roles: Mapping[Flow, tuple[Array, Array]] = {
        Flow.EVERYONE: (always, always),
        Flow.FROM_ROOT: (root, other),
        Flow.TO_ROOT: (other, root),
        Flow.SEND: (always, never),
        Flow.RECEIVE: (never, always),
    }
    # A barrier synchronizes without bytes, and so does an empty message.
    not_empty: Mapping[Extent, Array] = {
        Extent.NOTHING: always,
        Extent.WHOLE: moves,
        Extent.SHARE: share,
        Extent.SPLITS: moves & (even | pickled),
    }
    result = np.where(block["state"] == State.FAILED, FAILED, 0).astype(np.uint8)
    result[np.isin(block["clock"], DEVICE_CLOCKS)] |= ON_DEVICE
    for op, at in labels.by_operation(kinds):
        operation = OPERATIONS.get(op)
        if operation is None or operation.flow not in roles:
            continue
        source, target = (role[at] for role in roles[operation.flow])
        if not operation.is_message:
            source, target = source & not_empty[operation.input][at], target & not_empty[operation.output][at]
        result[at] |= (SOURCE * source + TARGET * target).astype(np.uint8)
        if operation.input is Extent.SPLITS:
            result[at] |= (UNCERTAIN * ~source).astype(np.uint8)
    return result


def operations(block: RecordBlock) -> Array:
    """Return a number of each call's operation, uint8, shape (n,); a send and its receive have the same one."""
    names = np.where(block.labels.categories("op") == "recv", "send", block.labels.categories("op")).astype(str)
    numbers = np.searchsorted(np.sort([*OPERATIONS]), names).astype(np.uint8)
    return np.asarray(numbers[block["kind"]])


def agree(calls: MatchedCalls) -> Array:
    """Return whether the calls of each instance are one operation that did not fail, bool, shape (instances,).

    Args:
        calls: Matched calls with the columns "operation" (`operations`) and "depends" (`dependencies`).
    """
    failed = calls.largest(calls["depends"] & FAILED) > 0
    return np.asarray((calls.largest(calls["operation"]) == calls.smallest(calls["operation"])) & ~failed)
