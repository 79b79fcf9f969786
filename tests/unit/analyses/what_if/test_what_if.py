"""`commtrace whatif`: predictions, their intervals, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from factory import ALL_REDUCE, REDUCE_SCATTER, SEND, LogFactory, record, training
from replayed_programs import Instruction, Operation, Program, run, write
from simulated_steps import MS, PROGRAMS, Simulation

import commtrace
from commtrace.analyses.what_if import changed_run as changed_run_module
from commtrace.analyses.what_if import changes
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run, parse_change
from commtrace.analyses.what_if.predictions import required_bandwidth, what_if
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.schema import Clock, Phase

US = 1_000


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """A run with a rank that computes 6 ms longer in forward."""

    def delay(rank: int, step: int, phase: Phase) -> int:
        return 6 * MS if rank == 2 and phase is Phase.FORWARD else 0

    PROGRAMS["data parallel"](Simulation(4, delay=delay), 10).write(tmp_path)
    return tmp_path


def alternating(folder: Path, compute_us: int, transfer_us: int, steps: int = 8) -> Path:
    """Write a run of two ranks that compute and all_reduce 1 MiB in turn."""
    program = Program(2, [], [[], []])
    for step in range(steps):
        times = dict.fromkeys((0, 1), transfer_us * US)
        program.operations.append(Operation(ALL_REDUCE, (0, 1), 0, times, step, False))
        for rank in (0, 1):
            program.instructions[rank].append(Instruction("compute", compute_us * US, -1, step=step))
            program.instructions[rank].append(Instruction("call", 0, step, step=step))
    write(program, run(program), folder)
    return folder


def test_the_catalogue_finds_the_straggler(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(late), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "commtrace-what-if"
    assert document["tables"]["what_if_run"][0]["worst_rank"] == "2"
    assert document["tables"]["what_if_run"][0]["error_ns"] == 0
    rows = {row["change"]: row for row in document["tables"]["what_if"]}
    assert rows["as recorded"]["gain"] == 0
    without = rows["without-straggler=worst"]
    assert rows["as recorded"]["step_ns"] - without["step_ns"] == pytest.approx(6 * MS, rel=0.1)
    assert without["low_ns"] < without["step_ns"] < without["high_ns"]
    gains = [row["gain"] for row in document["tables"]["what_if"][1:]]
    assert gains == sorted(gains, reverse=True)
    assert rows["scale-network=0.5x"]["gain"] < 0 < rows["scale-network=2x"]["gain"]
    assert set(document["columns"]["what_if"]) == set(document["tables"]["what_if"][0])


@pytest.mark.parametrize("width", [80, 160])
def test_text(width: int, late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(late), "--compute", "0.5x", "--required-bandwidth", "--width", str(width)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert "compute=0.5x" in text
    assert "Bandwidth that hides communication" in text
    assert "8 steps of 4 ranks were replayed." in text


def test_equal_runs_widen_the_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three runs without variation between steps: 160, 150 and 170 us. Student's 95 % quantile is 2.92."""
    first, second, third = (str(alternating(tmp_path / str(us), us, 50)) for us in (110, 100, 120))
    assert main(["whatif", first, "--scale-network", "1x", "--equal", second, "--equal", third, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    row = document["tables"]["what_if"][1]
    half = 2.92 * (4 / 3) ** 0.5 * 10 * US
    assert [row["low_ns"], row["high_ns"]] == pytest.approx([160 * US - half, 160 * US + half])
    assert "The intervals are for one more run, from 3 equal runs." in document["sentences"]
    assert main(["whatif", first, "--scale-network", "1x", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tables"]["what_if"][1]["low_ns"] == 160 * US
    assert any("runs may differ more (--equal DIR)" in sentence for sentence in document["sentences"])


def test_too_few_steps_have_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(alternating(tmp_path, 100, 50, steps=5)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["low_ns"] for row in document["tables"]["what_if"]} == {None}
    assert any("There are no intervals: with so few steps" in sentence for sentence in document["sentences"])


def test_changes_compose_in_their_order(tmp_path: Path) -> None:
    replayed = replayed_run(commtrace.open(alternating(tmp_path, 100, 60)))
    expected = {
        ("compute=0.5x",): 110,
        ("compute=0.5x", "scale-network=2x"): 80,
        ("free=all_reduce", "compute=3x"): 300,
        ("scale-network=data:0.5x",): 220,
        ("scale-network=2x", "scale-network=2x"): 115,
    }
    found = {texts: what_if(changed_run(replayed, texts))["step_ns"].iloc[-1] / US for texts in expected}
    assert found == expected


def test_bandwidth_that_hides_communication(tmp_path: Path) -> None:
    """100 us of computation, 50 us of transfer: an exposed share of s is left at a speed of (1 - s) / (2 s)."""
    table = required_bandwidth(changed_run(replayed_run(commtrace.open(alternating(tmp_path, 100, 50)))))
    (row,) = table.itertuples()
    assert row.dimension == "data"
    assert row.exposed == pytest.approx(1 / 3)
    assert [row.speed_20, row.speed_10, row.speed_5] == pytest.approx([2, 4.5, 9.5], rel=0.02)
    assert row.wire_bytes == 1 << 20  # each of two ranks sends half of the payload, twice
    assert row.bandwidth_gb_per_s == pytest.approx((1 << 20) / 50e-6 / 1e9)


def description(folder: Path, name: str, gb_per_s: float, latency_us: float = 0) -> str:
    level = {"latency_us": latency_us, "bandwidth_gb_per_s": gb_per_s}
    file = folder / name
    head = {"format": "commtrace-network-description", "version": 1, "ranks_per_node": 1}
    file.write_text(json.dumps({**head, "intra_node": level, "inter_node": level}))
    return str(file)


def test_another_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ring moves 1 MiB in 1 MiB / bandwidth; relative to the network of the run, only the ratio counts."""
    log = alternating(tmp_path / "log", 100, 50)
    slow, fast = (description(tmp_path, f"{name}.json", rate) for name, rate in (("slow", 1.0), ("fast", 8.0)))
    replayed = replayed_run(commtrace.open(log))
    steps = [
        what_if(changed_run(replayed, [change]))["step_ns"].iloc[-1] / US
        for change in (f"network={fast}", f"network={fast},{slow}")
    ]
    assert steps == pytest.approx([100 + (1 << 20) / 8e3, 100 + 50 / 8])
    assert main(["whatif", str(log), "--network", fast, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tables"]["what_if"][1]["low_ns"] is None
    assert any("its error is not known" in sentence for sentence in document["sentences"])


def test_time_beyond_the_network_stays(tmp_path: Path) -> None:
    """The old network explains 40 of 50 us, of which a tenth remains."""
    log = alternating(tmp_path / "log", 100, 50)
    old, new = (description(tmp_path, f"{us}.json", (1 << 20) / us / 1e3) for us in (40, 4))
    table = what_if(changed_run(replayed_run(commtrace.open(log)), [f"network={new},{old}"]))
    assert table["step_ns"].iloc[-1] / US == pytest.approx(100 + 4 + 10, abs=0.01)


def test_transfers_without_a_known_release_change_as_expected_times_do(tmp_path: Path) -> None:
    """The ranks' operations differ, so that nothing is known about waits: 50 us become an eighth."""
    log = LogFactory(tmp_path / "log")
    for rank, kind in enumerate((ALL_REDUCE, REDUCE_SCATTER)):
        files = log.process(rank, pid=4711 + rank, world_size=2)
        files.known({1: [0, 1]}, {1: "data"})
        begins = [1_000 * MS + 150 * US * step for step in range(8)]
        rows = [
            record(kind=kind, seq=step, step=step, payload=1 << 20, site=2, clock=Clock.RETURN, t_wait=0,
                t_begin=begin, t_return=begin + 50 * US, t_end=begin + 50 * US)
            for step, begin in enumerate(begins)
        ]  # fmt: skip
        files.write(rows).end()
    replayed = replayed_run(commtrace.open(tmp_path / "log"))
    assert (replayed.replay.paths.blocked.times["release"] == -1).all()
    old, new = (description(tmp_path, name, rate) for name, rate in (("old", 1.0), ("new", 8.0)))
    table = what_if(changed_run(replayed, [f"network={new},{old}"]))
    assert table["step_ns"].iloc[-1] / US == pytest.approx(100 + 50 / 8)


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[object]:
    """Return a list that grows by an item with each call of a function of a module."""
    calls: list[object] = []
    original = getattr(module, name)

    def function(*arguments: object) -> object:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(module, name, function)
    return calls


def test_each_change_is_made_once(late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the catalogue and the required bandwidth on top of it."""
    calls = counted(monkeypatch, changes, "_on_network")
    network = description(late, "network.json", 1.0)
    assert main(["whatif", str(late), "--network", network, "--all", "--required-bandwidth", "--json"]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize("arguments", [["--without-straggler", "worst"], ["--all"], ["--required-bandwidth"]])
def test_the_worst_straggler_is_searched_for_once(
    arguments: list[str], late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search tries each of the four ranks."""
    calls = counted(monkeypatch, changed_run_module, "without_straggler")
    assert main(["whatif", str(late), *arguments, "--json"]) == 0
    assert len(calls) == 4


def test_transfers_that_overlap_share_a_link(tmp_path: Path) -> None:
    """A small background operation that waits for a large one on the link becomes faster as the large one does."""
    program = Program(2, [], [[], []])
    for step in range(6):
        for part, kind in enumerate((ALL_REDUCE, SEND)):
            times = dict.fromkeys((0, 1), (900 + part) * US)
            program.operations.append(Operation(kind, (0, 1), 0, times, step, True, bool(part)))
        for rank in (0, 1):
            numbers = 2 * step, 2 * step + 1
            program.instructions[rank].append(Instruction("compute", 100 * US, -1, step=step))
            program.instructions[rank] += [Instruction("call", 0, number, step=step) for number in numbers]
            program.instructions[rank] += [Instruction("wait", 0, number, step=step) for number in numbers]
    write(program, run(program), tmp_path / "log")
    old, new = (description(tmp_path, name, rate, latency_us=10) for name, rate in (("old", 1.0), ("new", 4.0)))
    table = what_if(changed_run(replayed_run(commtrace.open(tmp_path / "log")), [f"network={new},{old}"]))
    before, after = table["step_ns"]
    assert before / US > 1000
    assert 100 + (before / US - 100) / 4 < after / US < 350  # without sharing, the message would still take 901 us


def test_the_table_of_a_run(late: Path) -> None:
    opened = commtrace.open(late)
    assert opened.what_if("compute=0.5x", "no-wait")["change"].tolist() == ["as recorded", "compute=0.5x no-wait"]
    assert len(opened.what_if()) > 8
    assert opened.describe_table("what_if").loc["gain", "unit"] == "fraction"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compute", "half"], "'half' is not a factor such as 2x or 0.5x"),
        (["--compute", "0x"], "'0x' is not a factor"),
        (["--free", "tensor"], "'tensor' is no dimension, operation or purpose of the steps; choose from 'all_reduce'"),
        (["--without-straggler", "9"], "the run has no rank 9"),
        (["--without-straggler", "best"], "'best' is neither a rank nor worst"),
        (["--network", "nowhere.json"], "nowhere.json: no such file, and no built-in description"),
        (["--network", "a,b,c"], "give one network, or two"),
    ],
)
def test_errors(arguments: list[str], message: str, late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(late), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_unknown_changes() -> None:
    for text in ("faster", "balance=1", "no-wait=", "free"):
        with pytest.raises(CommtraceError, match=re.escape(repr(text))):
            parse_change(text)


def test_a_run_that_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path, steps=2)
    assert main(["whatif", str(tmp_path)]) == 2
    assert "its steps cannot be replayed: this needs three training steps of all ranks" in capsys.readouterr().err
