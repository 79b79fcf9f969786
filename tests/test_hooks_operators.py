"""Every operation of torch.distributed, called by three ranks: what the log says of each, on each rank."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

from hook_programs.runs import FOLDER, Call, Log, launch, logs

from commtrace.schema import Clock, Flag, Phase, State

RANKS = 3
ASYNC, COALESCED, OBJECT, SPARSE, UNEVEN = Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.SPARSE, Flag.UNEVEN
NONE = Flag(0)

_folders: list[tempfile.TemporaryDirectory[str]] = []


class Ran(NamedTuple):
    """What one rank's program told, and its log."""

    told: dict[str, Any]
    log: Log

    def case(self, name: str) -> list[Call]:
        """The calls of one case."""
        return self.log.between(self.told[name]["begin"], self.told[name]["end"])


@functools.cache
def ran() -> list[Ran]:
    """By rank."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    launch("operators", folder, log=folder / "log", ranks=RANKS)
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [Ran(*each) for each in zip(told, logs(folder / "log"), strict=True)]


class Row(NamedTuple):
    """What is expected of a call."""

    op: str
    variant: str
    dtype: str | None
    payload: int
    local: int = 0
    flags: Flag = NONE
    peer: int = -1
    tag: int = -1
    reduce_op: str | None = None
    state: State = State.COMPLETE
    clock: Clock = Clock.WAIT


def row(call: Call) -> Row:
    return Row(
        call.op, call.variant, call.dtype, call.payload, call.local, call.flags, call.peer, call.tag, call.reduce_op,
        call.state, call.clock,
    )  # fmt: skip


def summed(payload: int, dtype: str = "float32", flags: Flag = NONE, reduce_op: str = "SUM", **other: Any) -> Row:
    return Row("all_reduce", "allreduce_", dtype, payload, flags=flags, reduce_op=reduce_op, **other)


BARRIER = Row("barrier", "barrier", None, 0)
UNSEEN: dict[str, Any] = {"state": State.UNOBSERVABLE, "clock": Clock.NONE}
RETURNED: dict[str, Any] = {"state": State.RETURNED, "clock": Clock.NONE}
FLOAT = "float32"

# The same on all ranks.
COMMON: dict[str, list[Row]] = {
    "all_reduce": [summed(400)],
    "all_reduce_asynchronous": [summed(400, flags=ASYNC, reduce_op="MAX")],
    "all_reduce_polled": [summed(400, flags=ASYNC, clock=Clock.TEST)],
    "all_reduce_dropped": [summed(28, flags=ASYNC, **UNSEEN), BARRIER],
    "all_reduce_kept": [summed(36, flags=ASYNC, **RETURNED)],
    "all_reduce_coalesced": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 4 * (10 + 20), flags=COALESCED, reduce_op="SUM")
    ],
    "coalescing_manager": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 4 * (10 + 30), flags=COALESCED, reduce_op="SUM")
    ],
    "all_gather": [Row("all_gather", "allgather_", "bfloat16", 3 * 50 * 2, 50 * 2)],
    "all_gather_into_tensor": [Row("all_gather", "_allgather_base_", FLOAT, 3 * 40 * 4, 40 * 4)],
    "all_gather_coalesced": [
        Row("all_gather", "allgather_into_tensor_coalesced_", FLOAT, 3 * 10 * 4, 10 * 4, flags=COALESCED)
    ],
    "reduce_scatter": [Row("reduce_scatter", "reduce_scatter_", FLOAT, 3 * 11 * 4, 11 * 4, reduce_op="SUM")],
    "reduce_scatter_tensor": [
        Row("reduce_scatter", "_reduce_scatter_base_", FLOAT, 3 * 12 * 4, 12 * 4, reduce_op="MIN")
    ],
    "all_to_all_single": [Row("all_to_all", "alltoall_base_", FLOAT, 3 * 5 * 4, 5 * 4)],
    "all_to_all_empty": [Row("all_to_all", "alltoall_base_", FLOAT, 0)],
    "broadcast": [Row("broadcast", "broadcast_", "bool", 100, peer=2)],
    "reduce": [Row("reduce", "reduce_", "float64", 800, peer=1, reduce_op="SUM")],
    "gather": [Row("gather", "gather_", FLOAT, 3 * 40, 40, peer=1)],
    "scatter": [Row("scatter", "scatter_", FLOAT, 3 * 40, 40, peer=2)],
    "barrier": [BARRIER],
    "monitored_barrier": [Row("barrier", "monitored_barrier_", None, 0, clock=Clock.RETURN)],
    "empty": [summed(0)],
    "inference_mode": [summed(40)],
    "complex_numbers": [summed(80)],  # torch.distributed itself makes pairs of real numbers of them
    "not_contiguous": [summed(160)],
    "failing": [summed(40, reduce_op="BAND", state=State.FAILED, clock=Clock.NONE)],
    "functional": [summed(40, flags=ASYNC)],
    "functional_coalesced": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 120, flags=ASYNC | COALESCED, reduce_op="SUM")
    ],
    "functional_dropped": [summed(24, flags=ASYNC, **RETURNED), BARRIER],
    "functional_of_a_view": [summed(80, flags=ASYNC)],
    "redistribute": [Row("all_gather", "allgather_into_tensor_coalesced_", FLOAT, 3 * 32, 32, flags=ASYNC | COALESCED)],
    "compiled": [summed(100, flags=ASYNC)] * 2,
    "world_again": [summed(12)] * 2,
}

# By rank.
EACH: dict[str, list[list[Row]]] = {
    "all_to_all_uneven": [
        [Row("all_to_all", "alltoall_base_", FLOAT, 20 * rows, 20 * own, flags=flags)]
        # What rank 2 sends is even, what it gets is not.
        for rows, own, flags in ((6, 1, UNEVEN), (5, 0, UNEVEN), (6, 2, UNEVEN))
    ],
    "send_and_recv": [
        [Row("send", "send", FLOAT, 32, peer=1, tag=5)] * 2,
        [Row("recv", "recv_", FLOAT, 32, peer=0, tag=5)] * 2,
        [],
    ],
    "isend_and_irecv": [
        [],
        [Row("send", "send", FLOAT, 32, peer=2, tag=0, flags=ASYNC)],
        [Row("recv", "recv_", FLOAT, 32, peer=1, tag=0, flags=ASYNC)],
    ],
    "batch_isend_irecv": [
        [
            Row("send", "send", FLOAT, 64, peer=(rank + 1) % 3, tag=0, flags=ASYNC),
            Row("recv", "recv_", FLOAT, 64, peer=(rank - 1) % 3, tag=0, flags=ASYNC),
        ]
        for rank in range(RANKS)
    ],
    "recv_from_any": [
        [Row("send", "send", FLOAT, 16, peer=2, tag=0)],
        [],
        [Row("recv", "recv_any_source_", FLOAT, 16, tag=0)],
    ],
    "subgroup": [
        [],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("send", "send", FLOAT, 12, peer=2, tag=0)],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("recv", "recv_", FLOAT, 12, peer=1, tag=0)],
    ],
    # Of a matrix with one, two, three numbers in it: two int64 indices and a float32 each.
    "all_reduce_sparse": [[summed((2 * 8 + 4) * (rank + 1), flags=SPARSE)] for rank in range(RANKS)],
}
OBJECTS = ("all_gather_object", "broadcast_object_list")


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", [*COMMON, *EACH])
def test_a_call_is_recorded_as_it_was_made(name: str, rank: int) -> None:
    expected = COMMON[name] if name in COMMON else EACH[name][rank]
    assert [row(call) for call in ran()[rank].case(name)] == expected


def test_every_case_is_checked() -> None:
    assert set(ran()[0].told) == {*COMMON, *EACH, *OBJECTS}


@pytest.mark.parametrize("name", OBJECTS)
def test_pickled_objects_are_flagged_and_counted(name: str) -> None:
    for each in ran():
        sizes, data = each.case(name)
        assert sizes.flags == data.flags == OBJECT
        assert (sizes.dtype, data.dtype) == ("int64", "uint8")
        assert data.payload >= 50 if name == "broadcast_object_list" else data.payload == 3 * data.local


def test_results_are_those_of_an_untraced_program() -> None:
    for rank, each in enumerate(ran()):
        told = {name: entry["tells"] for name, entry in each.told.items() if entry["tells"] is not None}
        assert told == {
            **({"recv_from_any": 0} if rank == 2 else {}),
            "all_gather_object": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "failing": "Cannot use ReduceOp.BAND with non-integral dtype",
            "functional": 30.0,
            "functional_coalesced": 90.0,
            "functional_of_a_view": 45.0,
            "redistribute": 24.0,
            "compiled": [7.0, 7.0],
        }


def test_the_site_is_the_program_s_own_line() -> None:
    for each in ran():
        for name, entry in each.told.items():
            first, last = entry["lines"]
            for call in each.case(name):
                assert call.file == str(FOLDER / "operators.py"), name
                if name == "compiled":  # the line of the function that was compiled is not known any more
                    assert call.function in ("compiled", "reduced")
                else:
                    assert (call.function, first <= call.line <= last) == (name, True)


def test_before_the_first_step_everything_is_initialisation() -> None:
    for each in ran():
        calls = [call for name in each.told if name != "compiled" for call in each.case(name)]
        assert {(call.step, call.phase) for call in calls} == {(-1, Phase.INIT)}


def test_times_are_in_order_and_none_is_invented() -> None:
    for each in ran():
        for call in each.log.calls:
            assert 0 < call.t_begin <= call.t_return
            assert bool(call.t_end) == (call.state == State.COMPLETE)
            assert bool(call.t_wait) == (call.clock == Clock.WAIT)
            if call.clock == Clock.WAIT:
                assert call.t_return <= call.t_wait <= call.t_end


def test_collectives_are_numbered_without_gaps_and_alike_on_all_ranks() -> None:
    numbered = []
    for each in ran():
        calls = [call for call in each.log.calls if call.op not in ("send", "recv") and len(call.ranks) == RANKS]
        numbered.append([(call.group["index"], call.seq, call.variant) for call in calls])
    assert numbered[0] == numbered[1] == numbered[2]
    assert [seq for index, seq, _ in numbered[0] if index == 0] == list(range(len(numbered[0]) - 3))


def test_messages_are_numbered_by_source_destination_and_tag() -> None:
    sent, received = ran()[0].case("send_and_recv"), ran()[1].case("send_and_recv")
    assert [call.seq for call in sent] == [call.seq for call in received] == [0, 1]
    # The second message from 1 to 2 with tag 0 has the same number on both sides, whatever else was sent.
    assert [call.seq for call in ran()[1].case("batch_isend_irecv") if call.op == "send"] == [1]
    assert [call.seq for call in ran()[2].case("batch_isend_irecv") if call.op == "recv"] == [1]


def test_groups_are_known_by_global_ranks_name_description_and_index() -> None:
    (pair,) = {call.group["id"]: call.group for call in ran()[2].case("subgroup")}.values()
    assert (pair["ranks"], pair["desc"], pair["index"]) == ([1, 2], "a pair", 0)
    assert pair["backend"].startswith("cpu:gloo")
    first, again = (ran()[0].case(name)[0].group for name in ("all_reduce", "world_again"))
    assert first["name"] == again["name"]
    assert (first["index"], again["index"]) == (0, 1)
    assert first["ranks"] == again["ranks"] == [0, 1, 2]
