"""Format of a recorded call in memory, in the ring and on disk, and columns of the event table.

`RECORD` is the only definition of the binary format: both recorders write it, the reader reads it, and
`docs/reference/log-format.md` shows how to read it with numpy alone. A sample record, as `numpy` prints it:

    t_begin=8120531  t_return=8129742  t_wait=8130011  t_start=0  t_end=9411873  payload=1048576  local=0
    seq=17  group=1  site=3  step=2  micro_batch=0  peer=-1  tag=-1  batch=0  kind=1  thread=1
    phase=BACKWARD  clock=WAIT  flags=ASYNC  state=COMPLETE
"""

from __future__ import annotations

from enum import Enum, IntEnum, IntFlag
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

FORMAT: Final = "commtrace"

# History of the format. The reader of tables (`reading/table_reader.py`) refuses a log of a newer version and reads
# older ones; that of records (`reading/segment_reader.py`) knows one layout, RECORD, which has not changed so far.
#   1  2026-11  first: 96-byte records, one JSON-lines table file per process
#   2  2026-11  member lists of groups as ranges with strides
VERSION: Final = 2

# Times are nanoseconds of CLOCK_MONOTONIC on the host that recorded them; 0 means "not known", never "zero".
# `state` is the last byte and is written last, so a record whose state is not FREE is complete, even if the process was
# killed in the middle of a call.
RECORD: Final = np.dtype(
    [
        ("t_begin", "<i8"),  # the call was entered
        ("t_return", "<i8"),  # the call returned to its caller
        ("t_wait", "<i8"),  # the caller began to wait for the result
        ("t_start", "<i8"),  # the transfer began on the device, if the backend reports it
        ("t_end", "<i8"),  # the operation was complete; `clock` says what observed it
        ("payload", "<i8"),  # bytes, by the nccl-tests convention (commtrace.volume)
        ("local", "<i8"),  # bytes of the payload that never leave this rank (its own share or split)
        ("seq", "<u4"),  # n-th collective of the group; point-to-point: n-th of (group, source, destination, tag)
        ("group", "<u4"),  # row of the groups table
        ("site", "<u4"),  # row of the sites table: call site and purpose; 0: not recorded
        ("step", "<i4"),  # training step, -1: before the first one
        ("micro_batch", "<i4"),  # micro-batch within the step, -1: not known
        ("peer", "<i4"),  # global rank of root, source or destination, -1: none
        ("tag", "<i4"),  # message tag, -1: none
        ("batch", "<u4"),  # calls of one coalesced batch share a number, 0: none
        ("kind", "<u2"),  # row of the kinds table
        ("thread", "<u2"),  # number of the calling thread within the process, from 1
        ("phase", "u1"),  # Phase
        ("clock", "u1"),  # Clock: where t_end came from
        ("flags", "u1"),  # Flag bits
        ("state", "u1"),  # State; written last
    ]
)
assert RECORD.itemsize == 96
Records: TypeAlias = npt.NDArray[np.void]


class Fields(Protocol):
    """Records, or some of their fields: arrays of shape (n,) by field name."""

    def __len__(self) -> int:
        """Return n."""

    def __getitem__(self, name: str, /) -> npt.NDArray[Any]:
        """Return a field of all records, shape (n,)."""


# The same layout for `struct.pack_into`, which fills a slot in one call, the state last. A test compares the two.
RECORD_STRUCT: Final = "<7q3I4iI2H4B"


class State(IntEnum):
    """Last known state of a call."""

    FREE = 0  # a slot of the ring that holds no record
    BEGUN = 1  # entered, not returned: in flight, or the process died in it
    RETURNED = 2  # returned; its end may still be observed
    COMPLETE = 3  # `t_end` is known
    UNOBSERVABLE = 4  # returned, and this recorder cannot observe its end
    FAILED = 5  # the call raised an exception


class Phase(IntEnum):
    """The part of a training step that a call belongs to. An evaluation is not part of the step before it."""

    OTHER = 0
    INIT = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    EVALUATION = 5


class Clock(IntEnum):
    """How the end of a call was observed."""

    NONE = 0
    RETURN = 1  # the call itself blocks until the operation is complete
    WAIT = 2  # a wait of the program returned
    FUTURE = 3  # a completion callback
    DEVICE = 4  # the device's own measurement
    TEST = 5  # a poll (is_completed, Test) returned true: the end is at or before this time
    DEVICE_WAIT = 6  # the device's stream passed a wait of the program: the end is at or before this time


DEVICE_CLOCKS: Final = (int(Clock.DEVICE), int(Clock.DEVICE_WAIT))


class Flag(IntFlag):
    """Properties of a call."""

    ASYNC = 1  # the caller requested a handle
    COALESCED = 2  # one of a batch that the backend may merge, or several tensors in one call
    CAPTURED = 4  # recorded into a device graph: the times are those of the capture
    OBJECT = 8  # carries pickled Python objects
    SPARSE = 16  # the payload is the indices and values of sparse tensors
    SIMULATED = 32  # a dry run: nothing was sent
    UNEVEN = 64  # ranks have shares of different sizes


def flags_label(bits: int) -> str:
    """Return the names of flags, joined by "|"."""
    return "|".join(str(flag.name).lower() for flag in Flag if bits & flag.value)


class Purpose(Enum):
    """Why a call was made, as the library that made it knows it. Rows of the sites table have the value."""

    PROGRAM = "the program's own"  # a line of the program made it, and no library knows more
    PARAMETERS_AT_START = "parameters distributed at start"
    PARAMETERS_FORWARD = "parameters gathered for forward"
    PARAMETERS_BACKWARD = "parameters gathered for backward"
    PARAMETERS_RECOMPUTATION = "parameters gathered for recomputation"
    PARAMETERS_STAGE = "parameters gathered for a pipeline stage"
    PARAMETERS_ON_REQUEST = "parameters gathered on request"
    PARAMETERS_AFTER_OPTIMIZER = "parameters gathered after the optimizer"
    GRADIENTS = "gradients reduced"
    BUCKETS = "buckets agreed"  # DDP, after the first backward pass
    USED_PARAMETERS = "used parameters exchanged"  # DDP with find_unused_parameters
    GRADIENT_NORM = "gradient norm"
    GRADIENT_OVERFLOW = "overflow of gradients"
    BUFFERS = "buffers broadcast"
    OPTIMIZER = "optimizer step"
    ACTIVATIONS = "activations"
    ACTIVATIONS_RECOMPUTED = "activations recomputed"
    ACTIVATION_GRADIENTS = "activation gradients"
    TENSORS = "distributed tensors outside of the model"  # full_tensor() or redistribute() by the program
    LOSS = "loss"
    METRICS = "metrics"  # losses and metrics gathered to be logged
    EVALUATION = "evaluation"  # results of an evaluation, other than metrics
    DATA = "data"  # batches, and what ranks agree on about them
    PIPELINE_ACTIVATIONS = "pipeline activations"
    PIPELINE_GRADIENTS = "pipeline gradients"
    PIPELINE_SET_UP = "pipeline stages set up"  # shapes agreed, and connections made
    EXPERT_TOKENS = "tokens of experts"
    EXPERT_COUNTS = "numbers of tokens of experts"
    EXPERT_DISPATCH = "tokens dispatched to experts"
    EXPERT_COMBINE = "tokens combined from experts"
    EXPERT_GRADIENTS = "gradients of tokens of experts"
    ATTENTION = "keys and values of other ranks"  # ring attention
    ATTENTION_GRADIENTS = "gradients of keys and values of other ranks"
    BATCH_STATISTICS = "batch statistics"  # SyncBatchNorm
    CHECKPOINT_SAVED = "checkpoint saved"
    CHECKPOINT_LOADED = "checkpoint loaded"
    STATE_DICT = "state dict"
    RANDOM_STATE = "random state"
    OBJECTS = "objects exchanged"
    MODEL_CHECKED = "model compared between ranks"
    FLAGS = "flags agreed"  # stop? save? received a signal?
    BARRIER = "barriers of libraries"


ACTIVITIES: Final = frozenset(
    {Purpose.CHECKPOINT_SAVED, Purpose.CHECKPOINT_LOADED, Purpose.STATE_DICT, Purpose.EVALUATION}
)
"""Purposes of what a program does now and then beside training. A typical step is a step without them."""

OWN_PURPOSES: Final = frozenset(
    {
        *(Purpose.PROGRAM, Purpose.PARAMETERS_ON_REQUEST, Purpose.TENSORS, Purpose.OBJECTS, Purpose.RANDOM_STATE),
        *(Purpose.METRICS, Purpose.DATA, Purpose.FLAGS, Purpose.BARRIER),
    }
)
"""Purposes of other calls that the program, or a framework that runs its loop, requests. Only rules have forms."""

WITHOUT_RECORD: Final = ("dropped", "removed", "lost", "unrecorded")
"""Counters (table `stats`) of the calls of a process that are missing from its log."""

# Columns of the event table (`Run.events()`, `commtrace export`): public, in this order, under EVENT_TABLE_VERSION.
EVENT_TABLE_VERSION: Final = 2
EVENT_COLUMNS: Final = (
    "rank", "op", "variant", "api", "group", "group_ranks", "group_size", "role", "dtype", "payload_bytes",
    "wire_bytes", "peer", "tag", "seq", "t_begin_ns", "t_return_ns", "t_wait_ns", "t_start_ns", "t_end_ns",
    "step", "micro_batch", "phase", "site", "state", "flags", "purpose",
)  # fmt: skip

COPIED_COLUMNS: Final = {
    "payload_bytes": "payload",
    **{f"{name}_ns": name for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")},
    **{name: name for name in ("peer", "tag", "seq", "step", "micro_batch")},
}
"""Column of the event table -> field of the record that it is copied from."""

# The parallel dimension that a group serves.
ROLES: Final = ("data", "tensor", "pipeline", "model", "sequence", "context", "expert", "world", "self", "unknown")
