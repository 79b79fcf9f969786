"""Backends like NCCL: no Work for a synchronous call, Works that are complete at launch, coalesced batches."""

from __future__ import annotations

import pytest
from hook_programs.runs import Ran, null_work
from recorders import ENDS, FUTURELESS_POLLED, NO_WORK, WAITED

from commtrace.schema import Clock, Flag, State

pytestmark = pytest.mark.long


@pytest.fixture
def ran(recorder: str) -> Ran:
    """Return the run of the only rank."""
    (only,) = null_work(recorder)
    return only


def test_without_a_work_the_end_cannot_be_seen(ran: Ran, recorder: str) -> None:
    calls = ran.case("synchronous")
    assert [call.op for call in calls] == [
        "all_reduce", "all_gather", "all_gather", "reduce_scatter", "all_to_all", "barrier",
    ]  # fmt: skip
    assert [(call.payload, call.local) for call in calls] == [(16, 0), (32, 16), (32, 16), (32, 16), (28, 16), (0, 0)]
    assert {(call.state, call.clock) for call in calls} == {ENDS[NO_WORK][recorder]}
    assert {(call.t_end, call.flags & Flag.ASYNC) for call in calls} == {(0, Flag(0))}
    assert all(call.t_return >= call.t_begin for call in calls)


def test_the_program_gets_no_work_either(ran: Ran) -> None:
    assert ran.told["nothing_is_given"]["tells"] is True


def test_a_wait_for_an_asynchronous_work_is_seen(ran: Ran) -> None:
    assert ran.told["asynchronous"]["tells"] is True
    calls = ran.case("asynchronous")
    assert [(call.state, call.clock, call.flags) for call in calls] == [(State.COMPLETE, Clock.WAIT, Flag.ASYNC)]


def test_a_future_that_is_complete_at_launch_is_no_end(ran: Ran) -> None:
    first, _ = ran.case("future_only")
    assert (first.payload, first.state, first.t_end) == (20, State.UNOBSERVABLE, 0)


def test_a_poll_that_says_yes_is_an_end(ran: Ran, recorder: str) -> None:
    (call,) = ran.case("polled")
    assert (call.state, call.clock) == ENDS[FUTURELESS_POLLED][recorder]
    assert call.t_end > call.t_return


def test_a_work_that_is_complete_at_launch_has_ended(ran: Ran, recorder: str) -> None:
    """The Work itself reports completion, not only its future."""
    (call,) = ran.case("complete_at_once")
    assert (call.state, call.clock) == ENDS[WAITED][recorder]


@pytest.mark.parametrize(
    ("name", "payloads", "flags"),
    [
        ("first_batch", [8, 12], Flag.COALESCED),
        ("batch_without_wait", [28, 32], Flag.COALESCED),
        ("batch_of_messages", [24, 24], Flag.COALESCED | Flag.ASYNC),
    ],
)
def test_calls_of_a_batch_share_a_number_and_its_end(name: str, payloads: list[int], flags: Flag, ran: Ran) -> None:
    first, second = ran.case(name)
    assert [first.payload, second.payload] == payloads
    assert first.flags == second.flags == flags
    assert first.batch == second.batch > 0
    assert (first.state, first.clock) == (second.state, second.clock) == (State.COMPLETE, Clock.WAIT)
    assert first.t_wait == second.t_wait > second.t_return


def test_batches_have_numbers_of_their_own(ran: Ran) -> None:
    names = ("first_batch", "batch_of_messages", "batch_without_wait", "abandoned_batch")
    assert len({ran.case(name)[0].batch for name in names}) == len(names)


def test_a_call_after_a_batch_that_an_exception_ended_is_not_in_it(ran: Ran) -> None:
    within, after = ran.case("abandoned_batch")
    assert within.batch > 0
    assert (after.batch, after.flags) == (0, Flag(0))
