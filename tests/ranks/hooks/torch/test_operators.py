"""The log of every operation of torch.distributed, called by three ranks, is correct on each rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

from hook_programs.runs import FOLDER, Call, Ran
from hook_programs.runs import ran as ran_program
from recorders import FAILED, FAILED_AND_FORGOTTEN, FORGOTTEN, KEPT, POLLED, WAITED, End, end

from commtrace.schema import Clock, Flag, Phase, State

RANKS = 3
ASYNC, COALESCED, OBJECT, SPARSE, UNEVEN = Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.SPARSE, Flag.UNEVEN
NONE = Flag(0)


class Row(NamedTuple):
    """Expected values of a call."""

    op: str
    variant: str
    dtype: str | None
    payload: int
    local: int = 0
    flags: Flag = NONE
    peer: int = -1
    tag: int = -1
    reduce_op: str | None = None
    how: str = WAITED
    """What happens to the call, in the terms of docs/explanation/recorders.md."""


def row(call: Call, how: str) -> Row:
    return Row(
        call.op, call.variant, call.dtype, call.payload, call.local, call.flags, call.peer, call.tag, call.reduce_op,
        how,
    )  # fmt: skip


def summed(payload: int, dtype: str = "float32", flags: Flag = NONE, reduce_op: str = "SUM", **other: Any) -> Row:
    return Row("all_reduce", "allreduce_", dtype, payload, flags=flags, reduce_op=reduce_op, **other)


BARRIER = Row("barrier", "barrier", None, 0)
FLOAT = "float32"

# The same on all ranks.
COMMON: dict[str, list[Row]] = {
    "all_reduce": [summed(400)],
    "all_reduce_asynchronous": [summed(400, flags=ASYNC, reduce_op="MAX")],
    "all_reduce_polled": [summed(400, flags=ASYNC, how=POLLED)],
    "all_reduce_dropped": [summed(28, flags=ASYNC, how=FORGOTTEN), BARRIER],
    "all_reduce_kept": [summed(36, flags=ASYNC, how=KEPT)],
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
    "monitored_barrier": [Row("barrier", "monitored_barrier_", None, 0)],
    "empty": [summed(0)],
    "inference_mode": [summed(40)],
    "complex_numbers": [summed(80)],  # torch.distributed converts them to pairs of real numbers
    "not_contiguous": [summed(160)],
    "failing": [summed(40, reduce_op="BAND", how=FAILED)],
    "failing_and_dropped": [summed(40, flags=ASYNC, reduce_op="BAND", how=FAILED_AND_FORGOTTEN)],
    "reduce_scatter_dropped": [
        Row("reduce_scatter", "_reduce_scatter_base_", FLOAT, 3 * 8, 8, reduce_op="SUM", flags=ASYNC, how=FORGOTTEN),
        BARRIER,
    ],
    "functional": [summed(40, flags=ASYNC)],
    "functional_coalesced": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 120, flags=ASYNC | COALESCED, reduce_op="SUM")
    ],
    "functional_dropped": [summed(24, flags=ASYNC, how=KEPT), BARRIER],
    "functional_of_a_view": [summed(80, flags=ASYNC)],
    "redistribute": [Row("all_gather", "allgather_into_tensor_coalesced_", FLOAT, 3 * 32, 32, flags=ASYNC | COALESCED)],
    "compiled": [summed(100, flags=ASYNC)] * 2,
    "world_again": [summed(12)] * 2,
}

# By rank.
EACH: dict[str, list[list[Row]]] = {
    "all_to_all_uneven": [
        [Row("all_to_all", "alltoall_base_", FLOAT, 20 * rows, 20 * own, flags=flags)]
        # Rank 2 sends equal parts but receives unequal ones.
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
    "message_dropped": [
        [Row("send", "send", FLOAT, 36, peer=1, tag=0, flags=ASYNC, how=FORGOTTEN), BARRIER],
        [Row("recv", "recv_", FLOAT, 36, peer=0, tag=0, flags=ASYNC), BARRIER],
        [BARRIER],
    ],
    "message_kept": [
        [Row("send", "send", FLOAT, 36, peer=1, tag=0, flags=ASYNC, how=KEPT), BARRIER],
        [Row("recv", "recv_", FLOAT, 36, peer=0, tag=0), BARRIER],
        [BARRIER],
    ],
    "subgroup": [
        [],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("send", "send", FLOAT, 12, peer=2, tag=0)],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("recv", "recv_", FLOAT, 12, peer=1, tag=0)],
    ],
    # Matrices with one, two and three elements: two int64 indices and a float32 for each element.
    "all_reduce_sparse": [[summed((2 * 8 + 4) * (rank + 1), flags=SPARSE)] for rank in range(RANKS)],
}
OBJECTS = ("all_gather_object", "broadcast_object_list")


def rows(name: str, rank: int) -> list[Row]:
    """Return the expected rows of a case."""
    return COMMON[name] if name in COMMON else EACH[name][rank]


@pytest.fixture
def ran(recorder: str) -> list[Ran]:
    """Return the run of each rank."""
    return ran_program("operators", recorder, ranks=RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", [*COMMON, *EACH])
def test_a_call_is_recorded_as_it_was_made(name: str, rank: int, ran: list[Ran], recorder: str) -> None:
    expected = rows(name, rank)
    calls = ran[rank].case(name)
    assert [row(call, wanted.how) for call, wanted in zip(calls, expected, strict=True)] == expected
    ends: list[End] = [(call.state, call.clock) for call in calls]
    assert ends == [end(wanted.how, wanted.variant, recorder) for wanted in expected]


def test_every_case_is_checked(ran: list[Ran]) -> None:
    assert set(ran[0].told) == {*COMMON, *EACH, *OBJECTS}


@pytest.mark.parametrize("name", OBJECTS)
def test_pickled_objects_are_flagged_and_counted(name: str, ran: list[Ran]) -> None:
    for run in ran:
        sizes, data = run.case(name)
        assert sizes.flags == data.flags == OBJECT
        assert (sizes.dtype, data.dtype) == ("int64", "uint8")
        assert data.payload >= 50 if name == "broadcast_object_list" else data.payload == 3 * data.local


def test_results_are_those_of_an_untraced_program(ran: list[Ran]) -> None:
    for rank, run in enumerate(ran):
        results = {name: entry["tells"] for name, entry in run.told.items() if entry["tells"] is not None}
        assert results == {
            **({"recv_from_any": 0} if rank == 2 else {}),
            "all_gather_object": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "failing": "Cannot use ReduceOp.BAND with non-integral dtype",
            "functional": 30.0,
            "functional_coalesced": 90.0,
            "functional_of_a_view": 45.0,
            "redistribute": 24.0,
            "compiled": [7.0, 7.0],
        }


def test_the_site_is_the_program_s_own_line(ran: list[Ran]) -> None:
    for run in ran:
        for name, entry in run.told.items():
            first, last = entry["lines"]
            for call in run.case(name):
                assert call.file == str(FOLDER / "operators.py"), name
                if name == "compiled":  # the line in the compiled function is no longer known
                    assert call.function in ("compiled", "reduced")
                else:
                    assert (call.function, first <= call.line <= last) == (name, True)


def test_before_the_first_step_everything_is_initialisation(ran: list[Ran]) -> None:
    for run in ran:
        calls = [call for name in run.told if name != "compiled" for call in run.case(name)]
        assert {(call.step, call.phase) for call in calls} == {(-1, Phase.INIT)}


def test_times_are_in_order_and_none_is_invented(ran: list[Ran], recorder: str) -> None:
    for run in ran:
        for call in run.log.calls:
            assert 0 < call.t_begin <= call.t_return
            assert bool(call.t_end) == (call.state == State.COMPLETE)
            assert not call.t_end or call.t_begin < call.t_end
            assert not call.t_wait or call.t_return <= call.t_wait
            if call.clock == Clock.WAIT:
                assert call.t_return <= call.t_wait <= call.t_end
            if recorder == "python":
                assert bool(call.t_wait) == (call.clock == Clock.WAIT)


def test_a_wait_that_does_not_show_the_end_is_seen_too(ran: list[Ran], recorder: str) -> None:
    """The native recorder records a wait that begins while the record is still in memory, even after the call's end."""
    for run in ran:
        waited = [call for call in run.log.calls if call.clock == Clock.FUTURE and call.t_wait]
        assert bool(waited) == (recorder == "native")


def test_collectives_are_numbered_without_gaps_and_alike_on_all_ranks(ran: list[Ran]) -> None:
    numbered = []
    for run in ran:
        calls = [call for call in run.log.calls if call.op not in ("send", "recv") and len(call.ranks) == RANKS]
        numbered.append([(call.group["index"], call.seq, call.variant) for call in calls])
    assert numbered[0] == numbered[1] == numbered[2]
    assert [seq for index, seq, _ in numbered[0] if index == 0] == list(range(len(numbered[0]) - 3))


def test_messages_are_numbered_by_source_destination_and_tag(ran: list[Ran]) -> None:
    sent, received = ran[0].case("send_and_recv"), ran[1].case("send_and_recv")
    assert [call.seq for call in sent] == [call.seq for call in received] == [0, 1]
    # The second message from 1 to 2 with tag 0 has the same number on both sides, whatever else was sent.
    assert [call.seq for call in ran[1].case("batch_isend_irecv") if call.op == "send"] == [1]
    assert [call.seq for call in ran[2].case("batch_isend_irecv") if call.op == "recv"] == [1]


def test_groups_are_known_by_global_ranks_name_description_and_index(ran: list[Ran]) -> None:
    (pair,) = {call.group["id"]: call.group for call in ran[2].case("subgroup")}.values()
    assert (pair["ranks"], pair["desc"], pair["index"]) == ("1-2", "a pair", 0)
    assert pair["backend"].startswith("cpu:gloo")
    first, again = (ran[0].case(name)[0].group for name in ("all_reduce", "world_again"))
    assert first["name"] == again["name"]
    assert (first["index"], again["index"]) == (0, 1)
    assert first["ranks"] == again["ranks"] == "0-2"
