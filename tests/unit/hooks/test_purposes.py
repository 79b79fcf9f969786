"""Marks of threads: nested, read by another store, and numbered by module."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from commtrace.hooks import purposes
from commtrace.schema import Purpose


@pytest.fixture
def store() -> Iterator[purposes.ThreadLocalStore]:
    yield purposes.ThreadLocalStore()
    purposes.keep_here()
    assert purposes.current() == 0


def test_a_mark_goes_with_its_thread_to_another_store_and_back(store: purposes.ThreadLocalStore) -> None:
    outer, inner = purposes.number(Purpose.DATA), purposes.number(Purpose.LOSS)
    with purposes.Marked(outer):
        purposes.keep_in(store)
        assert store.purpose == purposes.current() == outer
        with purposes.Marked(inner):
            assert store.purpose == inner
            purposes.keep_here()
            assert purposes.current() == inner
        assert purposes.current() == outer
        assert store.purpose == inner  # nothing reads it any more


def test_marks_of_threads_are_separate(store: purposes.ThreadLocalStore) -> None:
    seen = []
    purposes.keep_in(store)
    with purposes.Marked(purposes.number(Purpose.DATA)):
        thread = threading.Thread(target=lambda: seen.append(purposes.current()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_a_marked_function_restores_the_mark_when_it_raises(store: purposes.ThreadLocalStore) -> None:
    purposes.keep_in(store)

    def fail() -> None:
        assert purposes.facts(purposes.current()) == {"name": Purpose.DATA.value}
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        purposes.marking(Purpose.DATA)(fail)()
    assert purposes.current() == store.purpose == 0


def test_numbers_by_module_are_those_of_purpose_and_module() -> None:
    numbers = purposes.NumbersBy(Purpose.GRADIENTS, "module")
    assert numbers["layers.0"] == numbers["layers.0"] == purposes.number(Purpose.GRADIENTS, module="layers.0")
    assert numbers["layers.1"] != numbers["layers.0"]
    assert purposes.facts(numbers["layers.1"]) == {"name": Purpose.GRADIENTS.value, "module": "layers.1"}
    assert numbers[None] == purposes.number(Purpose.GRADIENTS, module="")
    assert purposes.facts(purposes.NumbersBy(Purpose.GRADIENTS, "stage")[0])["stage"] == 0
