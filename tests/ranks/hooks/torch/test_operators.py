"""The log of every operation of torch.distributed, called by three ranks, is correct on each rank."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hook_programs.runs import FOLDER, Ran
from hook_programs.runs import ran as ran_program
from operator_rows import COMMON, EACH, OBJECT, OBJECTS, RANKS, row, rows
from recorders import End, end

from commtrace.schema import Clock, Phase, State


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
