"""Every public method of mpi4py's classes is recorded, shows an end, or is on the list in docs/reference/mpi4py.md."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import mpi_launch  # noqa: F401  (MPI is not initialized in this process)
import pytest
from processes import ROOT

pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]

from mpi4py import MPI

from commtrace.hooks.mpi import hook
from commtrace.hooks.mpi.extension_types import namespace
from commtrace.hooks.mpi.methods import METHODS
from commtrace.hooks.mpi.wrappers import COMPLETION_METHODS

PAGE = (ROOT / "docs" / "reference" / "mpi4py.md").read_text()
CLASSES = (
    "Comm", "Intracomm", "Intercomm", "Topocomm", "Cartcomm", "Graphcomm", "Distgraphcomm", "Request", "Prequest",
    "Grequest", "Message", "Win",
)  # fmt: skip


def public(name: str) -> set[str]:
    """Public methods that a class defines itself; properties and constants move nothing."""
    found = namespace(getattr(MPI, name))
    return {each for each, value in found.items() if not each.startswith("_") and _is_method(value)}


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, staticmethod))


def silent() -> dict[str, set[str]]:
    """The page's list: class -> methods."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("<!-- silent -->")[2], re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", methods)) for name, methods in rows}


def recorded() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    for method in METHODS:
        found[method.owner.__name__].add(method.name)
    found["Request"] |= set(COMPLETION_METHODS)
    found["Prequest"] |= {"Start", "Startall"}
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_recorded_or_on_the_list(name: str) -> None:
    known = recorded()[name] | silent()[name]
    assert public(name) - known == set(), "neither recorded nor said to move no data"
    assert recorded()[name] & silent()[name] == set(), "recorded, and said to move no data"
    assert silent()[name] - public(name) == set(), "no such method"


def test_no_class_is_left_out() -> None:
    """A class of mpi4py that can communicate is one of those above, or inherits all that it has."""
    others = {
        name
        for name, value in vars(MPI).items()
        if isinstance(value, type) and issubclass(value, (MPI.Comm, MPI.Request, MPI.Message, MPI.Win))
    }
    assert {name for name in others if name.lower() != "internal"} == set(CLASSES)


def test_the_arguments_are_called_as_mpi4py_calls_them() -> None:
    for method in METHODS:
        original = namespace(method.owner).get(method.name)
        if original is not None:
            names = [name for name in inspect.signature(original).parameters if name != "self"]
            assert list(method.parameters) == names, f"{method.owner.__name__}.{method.name}"


def test_the_hook_replaces_and_restores_every_method() -> None:
    def everything() -> dict[tuple[str, str], Any]:
        return {(name, each): namespace(getattr(MPI, name))[each] for name in CLASSES for each in public(name)}

    before = everything()
    hook.install()
    try:
        during = everything()
        replaced = {key for key in before if during[key] is not before[key]}
        assert {(m.owner.__name__, m.name) for m in METHODS if (m.owner.__name__, m.name) in before} <= replaced
    finally:
        hook.uninstall()
    assert all(everything()[key] is value for key, value in before.items())
    assert MPI.pickle.dumps([1]) == pickle.dumps([1], MPI.pickle.PROTOCOL)
