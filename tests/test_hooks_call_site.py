"""Which frame is a call's site, and what the frames above it tell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commtrace.hooks import call_site
from commtrace.hooks.call_site import FORWARD, OBJECT, OPTIMIZER, WRAPPER, CallSites, _below_packages

TORCH = os.path.dirname(torch.__file__)


class Tables:
    """Rows in a list."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, table: str, key: Hashable, row: Callable[[], dict[str, Any]]) -> int:
        assert table == "sites"
        if key not in self._numbers:
            self.rows.append(row())
            self._numbers[key] = len(self.rows)
        return self._numbers[key]


def sites() -> tuple[CallSites, Tables]:
    tables: Any = Tables()
    return CallSites(tables), tables


def function_in(path: str, name: str = "passes_on") -> Callable[[Callable[[], Any]], Any]:
    """A function that calls its argument, from a file of this name."""
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(call):\n    return call()", path, "exec"), made)
    function: Callable[[Callable[[], Any]], Any] = made[name]
    return function


WRAPPERS = [
    f"{TORCH}/_ops.py",
    f"{TORCH}/distributed/distributed_c10d.py",
    "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
    "/usr/lib/python3/dist-packages/deepspeed/comm/comm.py",
    "/opt/venv/lib/python3.12/site-packages/deepspeed/runtime/pipe/p2p.py",
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
    os.path.join(os.path.dirname(call_site.__file__), "torch_kernels.py"),
    "/opt/venv/lib/python3.11/site-packages/commtrace/hooks/torch_kernels.py",
    "<eval_with_key>.17",
    "/tmp/torchinductor_me/ab/cabc.py",
]
PROGRAMS = [
    "/home/me/torch/_ops.py",
    "/home/me/torch/distributed/distributed_c10d.py",
    "/home/me/contextlib.py",
    "/home/me/lib/python-projects/functools.py",
    "/opt/venv/lib/python3.11/site-packages/mine/torch/_ops.py",
    "/opt/venv/lib/python3.11/site-packages/commtrace/workloads/gpt_neox/train.py",
    "/opt/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py",
    f"{TORCH}/nn/parallel/distributed.py",
    "/home/me/app.zip/train.py",
    "<string>",
    "<ipython-input-3-abc>",
]


@pytest.mark.parametrize("path", WRAPPERS)
def test_a_wrapper_is_passed_over(path: str) -> None:
    found, tables = sites()
    site, seen = function_in(path)(caller_s_site(found))
    assert seen & WRAPPER
    assert tables.rows[site - 1]["file"] == __file__


def caller_s_site(found: CallSites) -> Callable[[], tuple[int, int]]:
    """Looks for the site of the frame that calls it."""
    return lambda: found.find(1, deep=False)


@pytest.mark.parametrize("path", PROGRAMS)
def test_everybody_else_s_code_is_a_site(path: str) -> None:
    found, tables = sites()
    site, seen = function_in(path)(caller_s_site(found))
    assert not seen & WRAPPER
    assert tables.rows[site - 1] == {"file": path, "line": 2, "function": "passes_on"}


def test_a_line_is_one_site_and_another_line_another() -> None:
    found, tables = sites()
    numbers = [found.find(0, deep=False)[0] for _ in range(3)]
    assert len(set(numbers)) == 1
    assert found.find(0, deep=False)[0] not in numbers
    assert len(tables.rows) == 2


def test_without_a_frame_there_is_no_site() -> None:
    found, tables = sites()
    assert found.find(100_000, deep=True) == (0, 0)
    assert not tables.rows


@pytest.mark.parametrize(
    ("path", "name", "told"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", "all_gather_object", OBJECT),
        (f"{TORCH}/nn/modules/module.py", "_call_impl", FORWARD),
        (f"{TORCH}/optim/optimizer.py", "wrapper", OPTIMIZER),
    ],
)
def test_some_frames_tell_what_the_call_is(path: str, name: str, told: int) -> None:
    found, _ = sites()
    _, seen = function_in(path, name)(caller_s_site(found))
    assert seen == WRAPPER | told
    _, seen = function_in("/home/me/torch/optim/optimizer.py", name)(caller_s_site(found))
    assert seen == 0


def test_torch_still_has_the_functions_that_tell() -> None:
    for path, name in call_site._TELLING:
        file = os.path.join(os.path.dirname(TORCH), path)
        with open(file) as source:
            assert f"def {name}(" in source.read(), f"{path} has no {name} any more"


def test_only_a_deep_walk_looks_beyond_the_site() -> None:
    found, _ = sites()
    calls_module = function_in(f"{TORCH}/nn/modules/module.py", "_call_impl")
    model = function_in("/home/me/model.py")
    assert calls_module(lambda: model(lambda: found.find(1, deep=True)))[1] & FORWARD
    assert not calls_module(lambda: model(lambda: found.find(1, deep=False)))[1] & FORWARD


def test_the_outermost_module_tells_whether_this_is_training() -> None:
    found, _ = sites()

    class Asks(torch.nn.Module):
        def forward(self) -> bool:
            return found.in_training()

    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Asks()

        def forward(self) -> bool:
            inner: bool = self.inner()
            return inner

    model = Holds()
    assert not found.in_training()
    assert model()
    model.inner.eval()
    assert model()  # a frozen part of a model that is being trained
    assert not model.eval()()


def test_a_thread_without_frames_is_placed_where_another_waits_for_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tables = sites()
    frames: list[Any] = []
    run_backward = function_in(f"{TORCH}/autograd/graph.py", "_engine_run_backward")
    train = function_in("/home/me/train.py", "train")

    def find() -> int:
        # The thread that called backward() stands in C++, called by this frame.
        frames.append(sys._getframe(1))
        monkeypatch.setattr(sys, "_current_frames", lambda: {1: sys._getframe(0), 2: frames[0]})
        return found.of_backward()

    site = train(lambda: run_backward(find))
    assert tables.rows[site - 1]["file"] == __file__  # of the lambda that calls autograd
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: sys._getframe(0)})
    assert found.of_backward() == 0


def test_memory_is_bounded_for_programs_that_make_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "_MOST_CODES", 8)
    found, tables = sites()
    for number in range(50):
        function_in(f"<made {number}>")(caller_s_site(found))
    assert len(found._kinds) <= 8
    assert len(found._sites) <= 8
    assert {row["file"] for row in tables.rows} == {f"<made {number}>" for number in range(50)}


def test_classification_is_by_code_and_not_by_name_alone() -> None:
    code: CodeType = function_in("/home/me/module.py", "_call_impl").__code__
    assert call_site._classify(code) == 0
    assert _below_packages("/home/me/module.py") == ""
