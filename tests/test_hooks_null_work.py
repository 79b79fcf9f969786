"""Backends as NCCL: no Work for a synchronous call, Works that are complete at launch, coalesced batches."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import processes
import pytest
from hook_programs.runs import FOLDER, Call, logs

from commtrace.schema import Clock, Flag, State

torch = pytest.importorskip("torch")
cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
if shutil.which("g++") is None and shutil.which("c++") is None:
    pytest.skip("there is no C++ compiler to build the backend with", allow_module_level=True)
if not cpp_extension.is_ninja_available():
    pytest.skip("there is no ninja to build the backend with", allow_module_level=True)

_folders: list[tempfile.TemporaryDirectory[str]] = []


def build_folder() -> Path:
    """Kept between runs of the tests: compiling takes half a minute."""
    source = (FOLDER / "null_work_backend.cpp").read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"commtrace-tests-null-work-{key}"
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def ran() -> dict[str, tuple[list[Call], object]]:
    """Name of the case -> (its calls, what it told)."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    command: list[str | Path] = [sys.executable, FOLDER / "null_work.py", folder, build_folder()]
    result = processes.run(command, limit=240, COMMTRACE=folder / "log")
    assert result.status == 0, result.err[-8000:]
    (log,) = logs(folder / "log")
    told = json.loads((folder / "told.json").read_text())
    return {name: (log.between(entry["begin"], entry["end"]), entry["tells"]) for name, entry in told.items()}


def calls(name: str) -> list[Call]:
    return ran()[name][0]


def test_without_a_work_the_end_cannot_be_seen() -> None:
    found = calls("synchronous")
    assert [call.op for call in found] == [
        "all_reduce", "all_gather", "all_gather", "reduce_scatter", "all_to_all", "barrier",
    ]  # fmt: skip
    assert [(call.payload, call.local) for call in found] == [(16, 0), (32, 16), (32, 16), (32, 16), (28, 16), (0, 0)]
    assert {(call.state, call.clock, call.t_end, call.flags & Flag.ASYNC) for call in found} == {
        (State.UNOBSERVABLE, Clock.NONE, 0, Flag(0))
    }
    assert all(call.t_return >= call.t_begin for call in found)


def test_the_program_gets_no_work_either() -> None:
    assert ran()["nothing_is_given"][1] is True


def test_a_wait_for_an_asynchronous_work_is_seen() -> None:
    found, tells = ran()["asynchronous"]
    assert tells is True
    assert [(call.state, call.clock, call.flags) for call in found] == [(State.COMPLETE, Clock.WAIT, Flag.ASYNC)]


def test_a_future_that_is_complete_at_launch_is_no_end() -> None:
    first, _ = calls("future_only")
    assert (first.payload, first.state, first.t_end) == (20, State.UNOBSERVABLE, 0)


@pytest.mark.parametrize(
    ("name", "payloads", "flags"),
    [
        ("first_batch", [8, 12], Flag.COALESCED),
        ("batch_without_wait", [28, 32], Flag.COALESCED),
        ("batch_of_messages", [24, 24], Flag.COALESCED | Flag.ASYNC),
    ],
)
def test_calls_of_a_batch_share_a_number_and_its_end(name: str, payloads: list[int], flags: Flag) -> None:
    first, second = calls(name)
    assert [first.payload, second.payload] == payloads
    assert first.flags == second.flags == flags
    assert first.batch == second.batch > 0
    assert (first.state, first.clock) == (second.state, second.clock) == (State.COMPLETE, Clock.WAIT)
    assert first.t_wait == second.t_wait > second.t_return


def test_batches_have_numbers_of_their_own() -> None:
    names = ("first_batch", "batch_of_messages", "batch_without_wait", "abandoned_batch")
    assert len({calls(name)[0].batch for name in names}) == len(names)


def test_a_call_after_a_batch_that_an_exception_ended_is_not_in_it() -> None:
    within, after = calls("abandoned_batch")
    assert within.batch > 0
    assert (after.batch, after.flags) == (0, Flag(0))
