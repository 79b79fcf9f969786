"""Functions whose calls a hook marks, by wrappers in Python and by those of the native recorder."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.current_step import MicroBatch, Progress
from commtrace.hooks import purposes
from commtrace.hooks.native import libraries
from commtrace.recording.counters import Counters
from commtrace.recording.session import session
from commtrace.schema import Phase, Purpose

DATA, LOSS = purposes.number(Purpose.DATA), purposes.number(Purpose.LOSS)

NEEDS_LIBRARY = pytest.mark.skipif(not libraries.TORCH.available(), reason="the native recorder is not built")


@pytest.fixture(params=["python", pytest.param("native", marks=NEEDS_LIBRARY)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Keep marks in a store of this kind."""
    purposes.keep_in(libraries.TORCH.load().purposes if request.param == "native" else purposes.ThreadLocalStore())
    yield str(request.param)
    assert purposes.current() == 0
    purposes.keep_here()


@pytest.fixture
def progress(kind: str) -> Iterator[Progress]:
    """Return progress whose wrappers are of this kind."""
    from commtrace.current_step import progress

    progress.wrap_with(libraries.TORCH.load().as_part if kind == "native" else None)
    yield progress
    progress.wrap_with(None)
    progress.reset()


class Unit:
    """A part of a model that communicates."""

    def __init__(self, state: object = "idle") -> None:
        self.state = state
        self.seen: list[int] = []

    def gather(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Note the purpose."""
        self.seen.append(purposes.current())
        return args, kwargs

    def gather_with(self, gather: Callable[..., Any]) -> int:
        """Gather with a function that is not a method."""
        return int(gather("not the unit"))


def fails(*_: object, **__: object) -> int:
    """Fail, as a hook may in another version of its library."""
    raise RuntimeError


def test_marks_nest_and_end_with_an_exception(kind: str, progress: Progress) -> None:
    def raises() -> None:
        assert (purposes.current(), progress.marked_phase, progress.micro_batch) == (DATA, Phase.OPTIMIZER, -1)
        raise ValueError("broken")

    optimizer = progress.wrapper(Phase.OPTIMIZER, MicroBatch.NONE)
    forward = progress.wrapper(Phase.FORWARD)(optimizer(purposes.marking(Purpose.DATA)(raises)))
    progress.micro_batch = 3
    with purposes.Marked(LOSS):
        with pytest.raises(ValueError, match="broken"):
            forward()
        assert (purposes.current(), progress.marked_phase) == (LOSS, -1)
    with progress.marked(Phase.EVALUATION):  # each phase within is an evaluation
        assert progress.wrapper(Phase.FORWARD)(lambda: progress.marked_phase)() == Phase.EVALUATION


def test_micro_batches_are_counted_in_each_batch(kind: str, progress: Progress) -> None:
    forward, backward = (
        progress.wrapper(phase, MicroBatch.COUNTED)(lambda: progress.micro_batch)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert [forward(), forward()] == [-1, -1]
    for _ in range(2):
        progress.begin_batch()
        assert [forward(), forward(), backward(), forward(), backward()] == [0, 1, 0, 2, 1]
        progress.end_batch()
        assert forward() == -1


def test_parts_begin_and_finish_steps(kind: str, progress: Progress) -> None:
    ended: list[int] = []

    def states() -> tuple[int, bool, int]:
        return progress.step, progress.between_steps, progress.marked_phase

    train = progress.wrapper(begins_step=True)(states)
    inner = progress.wrapper(Phase.OPTIMIZER, begins_step=True, finishes_step=True)(states)
    outer = progress.wrapper(begins_step=True, finishes_step=True)(lambda: (inner(), states()))
    progress.first_step_listeners.append(lambda: ended.append(progress.step))
    try:
        with progress.marked(Phase.EVALUATION):
            assert train() == (-1, True, Phase.EVALUATION)
        assert train() == train() == (0, False, -1)
        assert outer() == ((0, False, Phase.OPTIMIZER), (0, False, -1))
        assert states() == (0, True, -1)
        assert inner() == (1, False, Phase.OPTIMIZER)
        assert progress.between_steps
    finally:
        progress.first_step_listeners.clear()
    assert ended == [0]


def test_an_error_of_the_first_step_is_raised(kind: str, progress: Progress) -> None:
    def fails() -> None:
        raise ValueError("of the step")

    seen: list[int] = []
    progress.first_step_listeners.append(lambda: seen.append(progress.step))
    try:
        with pytest.raises(ValueError, match="of the step"):
            progress.wrapper(begins_step=True, finishes_step=True)(fails)()
    finally:
        progress.first_step_listeners.clear()
    assert seen == [0]
    assert progress.between_steps


def test_arguments_and_results_pass(kind: str) -> None:
    marked = purposes.marking(Purpose.DATA)(Unit.gather)
    unit = Unit()
    assert marked(unit, 1, 2, name=3) == ((1, 2), {"name": 3})
    assert marked(self=unit) == ((), {})
    assert unit.seen == [DATA, DATA]


def test_only_unclaimed_calls_are_marked(kind: str) -> None:
    marked = purposes.marking_unclaimed(Purpose.DATA)(purposes.current)
    assert marked() == DATA
    with purposes.Marked(LOSS):
        assert marked() == LOSS


def test_purposes_by_a_key(kind: str) -> None:
    reads = []

    def read(unit: Unit, *args: Any, forward: bool = True) -> int:
        reads.append(unit.state)
        return {"forward": DATA, "backward": LOSS, "idle": ~LOSS, "none": 0}[str(unit.state)]

    marked = purposes.marking_by("state", 1, read=read)(Unit.gather)
    unit = Unit()
    states = ["forward", "backward", "forward", "none", "idle", "idle"]
    for unit.state in states:
        marked(unit, 7)
    expected = [DATA, LOSS, DATA, 0, LOSS, LOSS]
    assert unit.seen == expected
    assert reads == (["forward", "backward", "none", "idle", "idle"] if kind == "native" else states)
    unit.state = "forward"
    marked(unit, 8)
    marked(unit)  # without an argument that is part of the key: nothing is kept
    marked(unit)
    assert unit.seen[len(states) :] == [DATA] * 3
    assert len(reads) == (8 if kind == "native" else 9)


class Shard:
    """A placement, which is made anew for each call."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


class Strided(Shard):
    """A placement that a property tells apart."""

    factor = property(lambda self: 2 * self.dim)


def test_purposes_by_the_items_of_a_tuple(kind: str) -> None:
    reads: list[str] = []

    def read(_: Unit, spec: Any) -> int:
        reads.append(",".join(f"{type(place).__name__}{place.dim}" for place in spec.placements))
        return purposes.number(Purpose.DATA, places=reads[-1])

    marked = purposes.marking_by((1, "placements", "dim", "factor"), read=read)(Unit.gather)
    unit = Unit()
    shards = [(Shard, 0), (Shard, 1)]
    layouts: Any = [*shards, (Strided, 1)], [*shards, (Shard, 1)], shards, []
    for layout in 2 * layouts:
        marked(unit, SimpleNamespace(placements=tuple(place(dim) for place, dim in layout)))
    expected = ["Shard0,Shard1,Strided1", "Shard0,Shard1,Shard1", "Shard0,Shard1", ""]
    assert [purposes.facts(number)["places"] for number in unit.seen] == 2 * expected
    assert reads == (expected if kind == "native" else 2 * expected)
    marked(unit, SimpleNamespace(placements=[Shard(3)]))  # no tuple: nothing is kept
    marked(unit, SimpleNamespace(placements=[Shard(3)]))
    assert reads[-2:] == ["Shard3", "Shard3"]


def test_a_purpose_by_a_key_differs_in_a_backward_pass(kind: str) -> None:
    torch = pytest.importorskip("torch")
    marked = purposes.marking_by("state", read=lambda _: LOSS if torch._C._current_graph_task_id() >= 0 else DATA)
    unit = Unit()
    gather = marked(Unit.gather)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: gather(unit) and None)
    for _ in range(2):
        gather(unit)
        x.sum().backward()
    assert unit.seen == [DATA, LOSS] * 2


def test_a_purpose_by_the_object_that_calls(kind: str) -> None:
    units = Unit("forward"), Unit("backward")
    read = {"forward": DATA, "backward": LOSS}
    gather = purposes.marking_by("state", read=lambda unit, _: read[unit.state], of_caller=True)(
        lambda _: purposes.current()
    )
    assert [unit.gather_with(gather) for unit in (*units, *units)] == [DATA, LOSS] * 2


def test_the_object_that_calls_comes_before_the_arguments(kind: str) -> None:
    seen: list[tuple[Any, ...]] = []

    def read(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs))
        return DATA

    gather = purposes.marking_each(read, of_caller=True)(lambda *_, **__: purposes.current())
    unit = Unit()
    assert unit.gather_with(gather) == DATA
    assert unit.gather_with(lambda own: gather(1, own, name=2)) == DATA
    assert (lambda: gather(size=3))() == DATA
    assert seen == [
        ((unit, "not the unit"), {}),
        (("not the unit", 1, "not the unit"), {"name": 2}),
        ((None,), {"size": 3}),
    ]


def test_an_error_is_counted_and_leaves_the_mark(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SimpleNamespace(counters=Counters())
    monkeypatch.setattr(session, "recorder", recorder)
    unit = Unit()
    with purposes.Marked(LOSS):
        purposes.marking_each(fails)(Unit.gather)(unit)
        purposes.marking_by("absent", read=lambda unit: int(unit.absent))(Unit.gather)(unit)
        purposes.marking_by("state", read=fails)(Unit.gather)(unit)
        purposes.marking_by("state", read=fails)(Unit.gather)(unit)
    assert unit.seen == [LOSS] * 4
    assert recorder.counters.hook_errors == 4


def test_an_interrupt_is_raised_into_the_program(kind: str) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    unit = Unit()
    for wrapper in (
        purposes.marking_each(interrupted),
        purposes.marking_by("state", read=interrupted),
        purposes.marking_by("absent", read=interrupted),
    ):
        with pytest.raises(KeyboardInterrupt):
            wrapper(Unit.gather)(unit)
    assert unit.seen == []


def test_a_replacement_is_like_a_function(kind: str) -> None:
    original = Unit.gather
    marked = functools.wraps(original)(purposes.marking(Purpose.DATA)(original))
    marked.note = "more"  # type: ignore[attr-defined]
    assert (marked.__name__, marked.__doc__, marked.__module__) == ("gather", original.__doc__, __name__)
    assert inspect.signature(marked) == inspect.signature(original)
    assert purposes.code_of(marked) is original.__code__
    assert copy.deepcopy(marked) is marked
    try:
        Unit.gather = marked  # type: ignore[method-assign]
        unit = Unit()
        assert unit.gather(1) == Unit.gather(unit, 1) == ((1,), {})
        assert inspect.ismethod(unit.gather)
        assert unit.gather.__func__ is marked
        assert unit.gather == unit.gather
        assert pickle.loads(pickle.dumps(marked)) is marked
    finally:
        Unit.gather = original  # type: ignore[method-assign]


def test_a_replacement_is_released_with_what_it_has_kept(kind: str) -> None:
    class Key:
        pass

    unit = Unit(Key())
    marked = purposes.marking_by("state", read=lambda _: DATA)(Unit.gather)
    marked(unit)
    marked.itself = marked  # type: ignore[attr-defined]
    gone = weakref.ref(marked), weakref.ref(unit.state)
    del marked, unit
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_the_original_may_end_the_hook(kind: str) -> None:
    holder = SimpleNamespace()

    def original() -> int:
        del holder.marked
        gc.collect()
        return purposes.current()

    holder.marked = purposes.marking(Purpose.DATA)(original)
    del original
    assert holder.marked() == DATA
