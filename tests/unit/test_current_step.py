"""Steps, micro-batches and phases of a program."""

from __future__ import annotations

import pytest

import commtrace
from commtrace.current_step import Progress
from commtrace.schema import Phase


def test_a_step_begins_with_the_first_activity_after_the_last_ones_end() -> None:
    progress = Progress()
    assert (progress.step, progress.default_phase()) == (-1, Phase.INIT)
    for step in range(3):
        assert progress.between_steps
        for _ in range(4):
            progress.note_activity()
            assert progress.step == step
            assert not progress.between_steps
        progress.finish_step()
        assert progress.step == step, "what comes between two steps belongs to the earlier one"
    assert progress.default_phase() == Phase.OTHER


def test_where_the_program_says_so_only_it_counts() -> None:
    progress = Progress()
    progress.note_activity()
    progress.finish_step()
    progress.micro_batch = 3
    progress.begin_step()
    assert (progress.step, progress.micro_batch) == (1, -1)
    for _ in range(5):
        progress.note_activity()
        progress.finish_step()
    assert progress.step == 1
    progress.begin_step()
    assert progress.step == 2
    progress.reset()
    progress.note_activity()
    assert progress.step == 0


def test_an_evaluation_begins_no_step_whatever_runs_within() -> None:
    progress = Progress()
    with progress.named_phase("evaluation"):
        for name in ("forward", "backward"):
            with progress.named_phase(name):
                assert progress.marked_phase == Phase.EVALUATION
        assert (progress.step, progress.between_steps) == (-1, True)
    progress.note_activity()
    with progress.named_phase("evaluation"):  # with a validation model, within a step
        pass
    assert (progress.step, progress.between_steps, progress.marked_phase) == (0, False, -1)


def test_phases_nest_and_end_with_an_exception() -> None:
    progress = Progress()
    with progress.named_phase("forward"):
        with progress.marked(Phase.INIT):
            assert progress.marked_phase == Phase.INIT
        with pytest.raises(KeyError), progress.named_phase("optimizer"):
            raise KeyError
        assert progress.marked_phase == Phase.FORWARD
    assert progress.marked_phase == -1


@pytest.mark.parametrize(
    ("name", "step"), [("forward", 0), ("backward", 0), ("optimizer", 0), ("init", -1), ("other", -1)]
)
def test_a_phase_of_training_begins_a_step(name: str, step: int) -> None:
    progress = Progress()
    with progress.named_phase(name):
        assert progress.step == step


def test_stopped_within_a_phase() -> None:
    progress = Progress()
    with progress.named_phase("forward"), progress.marked(Phase.INIT):
        progress.reset()
    assert progress.marked_phase == -1


@pytest.mark.parametrize("name", ["forwards", "", 5])
def test_a_name_that_is_no_phase(name: str) -> None:
    with pytest.raises(commtrace.CommtraceError, match="choose from 'other', 'init', 'forward', 'backward'"):
        commtrace.phase(name)
