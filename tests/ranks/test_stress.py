"""Many threads, many groups and abrupt ends cause no hang, no crash and no lost call, with either recorder."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")

import processes
import ranks
import recorders
from hook_programs.runs import null_work_folder
from processes import Left

from commtrace.schema import Clock, Flag, State

ENDINGS: Final = (
    "plainly",
    "destroyed_in_flight",
    "not_destroyed",
    "daemons",
    "without_a_word",
    "raising",
    "threads_leave",
    "forked",
    "restarted",
    "interrupted",
    "compiled",
)
RUNS: Final = 100
RESTARTS: Final = 3
OPERATIONS: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send", "recv",
)  # fmt: skip
COLLECTIVES: Final = OPERATIONS[:6]
COMPILER: Final = shutil.which("g++")


# ---- the program's own accounts --------------------------------------------------------------------------------------

Counts = npt.NDArray[np.int64]


class Accounts(NamedTuple):
    """Counts of one rank, (group, operation) -> number, from programs/stress.py."""

    groups: list[str]
    begun: Counts
    came_back: Counts
    payload: Counts

    @classmethod
    def read(cls, folder: Path, rank: int, moment: str = "") -> Accounts:
        """Read the counts at a moment; at the end if none is given."""
        name = f"rank{rank}.{moment}.npy" if moment else f"rank{rank}.npy"
        totals = np.load(folder / name).sum(axis=0)
        groups = json.loads((folder / f"rank{rank}.json").read_text())
        return cls(groups, *(totals[..., i] for i in range(3)))


def noted(folder: Path, rank: int, moment: str) -> bool:
    return (folder / f"rank{rank}.{moment}.npy").exists()


def logged(left: Left, groups: list[str]) -> tuple[Counts, Counts]:
    """Return the records and their payload, (group, operation) -> number."""
    ops = {row["id"]: OPERATIONS.index(row["op"]) for row in left.tables.get("kinds", ())}
    places = {row["id"]: groups.index(row["name"]) for row in left.tables.get("groups", ())}
    calls, payload = np.zeros((2, len(groups), len(OPERATIONS)), np.int64)
    for record in left.records:
        cell = places[int(record["group"])], ops[int(record["kind"])]
        calls[cell] += 1
        payload[cell] += record["payload"]
    return calls, payload


# ---- what must hold for every log ------------------------------------------------------------------------------------


def assert_sane(left: Left, interrupted: int = 0) -> None:
    """Assert that no hook failed, counters are exact, and records are plausible; `interrupted` calls did not return."""
    stats, records = left.stats, left.records
    assert stats["hook_errors"] == 0, stats["first_error"]
    assert stats["write_errors"] == stats["lost"] == stats["removed"] == 0
    assert stats["calls"] == len(records) + stats["dropped"], (stats, len(records))
    assert_times_in_order(records)
    for table, field in (("kinds", "kind"), ("groups", "group"), ("sites", "site")):
        known = {row["id"] for row in left.tables.get(table, ())}
        assert set(records[field].tolist()) <= known, table
    assert_numbered(left, stats["dropped"] + interrupted)


def assert_times_in_order(records: processes.Records) -> None:
    begin, return_, wait, end = (records[name] for name in ("t_begin", "t_return", "t_wait", "t_end"))
    state, clock = records["state"], records["clock"]
    assert (begin > 0).all()
    assert set(state.tolist()) <= {State.BEGUN, State.RETURNED, State.COMPLETE, State.UNOBSERVABLE, State.FAILED}
    assert ((return_ >= begin) | (state == State.BEGUN)).all()
    assert ((wait == 0) | (wait >= begin)).all()
    assert ((end > 0) == (state == State.COMPLETE)).all()
    assert ((end > 0) == (clock != Clock.NONE)).all()
    assert (end >= begin)[end > 0].all()
    assert ((end >= wait) | (clock == Clock.FUTURE))[end > 0].all()
    assert (records["flags"] & ~np.uint8(Flag.ASYNC) == 0).all()
    assert ((records["thread"] > 0) & (records["thread"] < 100)).all()


def assert_numbered(left: Left, most_missing: int) -> None:
    """Assert that the numbers of a group's collectives are unique, and that at most `most_missing` are missing."""
    ops = {row["id"]: row["op"] for row in left.tables.get("kinds", ())}
    collective = np.array([ops[kind] in COLLECTIVES for kind in left.records["kind"].tolist()], bool)
    missing = 0
    for group in np.unique(left.records["group"]):
        numbers = np.sort(left.records["seq"][collective & (left.records["group"] == group)].astype(np.int64))
        assert (np.diff(numbers) > 0).all(), "two calls have one number"
        missing += int((np.diff(numbers) - 1).sum())
    assert missing <= most_missing


def assert_ranks_agree(lefts: list[Left]) -> None:
    """Assert that the n-th collective of a group is the same on both ranks."""

    def collectives(left: Left) -> dict[tuple[str, int], tuple[str, int]]:
        ops = {row["id"]: row["op"] for row in left.tables["kinds"]}
        names = {row["id"]: row["name"] for row in left.tables["groups"] if row["ranks"] == "0-1"}
        return {
            (names[record["group"]], int(record["seq"])): (ops[record["kind"]], int(record["payload"]))
            for record in left.records
            if record["group"] in names and ops[record["kind"]] in COLLECTIVES
        }

    first, second = (collectives(left) for left in lefts)
    for key in first.keys() & second.keys():
        assert first[key] == second[key]


def assert_complete(lefts: list[Left], folder: Path, rank: int) -> int:
    """Assert that all calls in a rank's accounts are in its logs or their counters; return the number of calls."""
    end = Accounts.read(folder, rank)
    least, moments = end, [moment for moment in ("raising", "leaving") if noted(folder, rank, moment)]
    if moments:  # what daemons did after that does not matter
        least = Accounts.read(folder, rank, moments[0])
    unseen = np.zeros_like(end.begun)
    for number in range(RESTARTS):
        if noted(folder, rank, f"stop{number}"):
            between = Accounts.read(folder, rank, f"start{number}").begun
            unseen += between - Accounts.read(folder, rank, f"stop{number}").came_back
    per_log = [logged(left, end.groups) for left in lefts]
    calls, payload = (sum((totals[i] for totals in per_log), np.zeros_like(end.begun)) for i in range(2))
    dropped = sum(left.stats["dropped"] for left in lefts)

    assert (calls <= end.begun).all(), "calls that nobody made"
    assert (payload <= end.payload).all()
    missing = np.maximum(least.came_back - unseen - calls, 0).sum()
    assert missing <= dropped, f"{missing} calls are lost; {dropped} were counted as dropped"
    if (least.came_back == end.begun).all() and not unseen.any():
        assert end.begun.sum() == calls.sum() + dropped
        assert dropped or (payload == end.payload).all()
    return int(end.begun.sum())


# ---- running the program ---------------------------------------------------------------------------------------------


# The first functional collective imports torch's compiler, which takes seconds, too.
_IMPORTS: Final = ("torch._dynamo", "torch.distributed._functional_collectives")


class Machine(ranks.Nursery):
    """Nursery whose ranks are traced by a recorder, or untraced."""

    def __init__(self, recorder: str | None) -> None:
        recorders.needs(recorder or "python")
        self._traced = recorder is not None
        untraced = {} if self._traced else {"COMMTRACE": ""}
        super().__init__(recorder or "", *_IMPORTS, PYTHONFAULTHANDLER=1, **untraced)

    def __enter__(self) -> Machine:
        super().__enter__()
        return self

    def stress(self, ending: str, seed: int, folder: Path) -> Outcome:
        """Run the program, and return its outcome."""
        settings = {"ring_records": 64, "drain_ms": 2} if seed % 2 else {"drain_ms": 100 if seed % 4 else 5}
        log = folder / "log"
        running = self.start(
            "stress", log, ending, seed, folder, traced=self._traced, **(settings if self._traced else {})
        )
        statuses = running.wait(90)
        return Outcome(ending, seed, folder, statuses, [running.output(rank) for rank in range(2)])


class Outcome(NamedTuple):
    """Outcome of a run."""

    ending: str
    seed: int
    folder: Path
    statuses: list[int]
    outputs: list[str]

    @property
    def crashed(self) -> bool:
        """Whether a signal ended a rank: gloo may abort a process that ends, traced or not."""
        return any(status < 0 for status in self.statuses)

    def assert_ended_by_itself(self) -> None:
        """Assert that the program reached its own last line on each rank."""
        for rank, (status, output) in enumerate(zip(self.statuses, self.outputs, strict=True)):
            if self.ending == "raising":
                assert noted(self.folder, rank, "raising"), output
                assert "KeyError: 'of the program'" in output
                assert status == 1 or status < 0, output
            else:
                assert "leaving" in output, output
                assert status <= 0, output

    def assert_accounted(self, recorder: str) -> int:
        """Assert that every call of both ranks is in a log, and return the number of calls."""
        total = 0
        first = processes.salvaged(self.folder / "log")
        others = [left for n in range(RESTARTS) for left in processes.salvaged(self.folder / f"log{n}")]
        assert len(first) == 2
        for left in [*first, *others]:
            assert left.tables["process"][0]["recorder"] == recorder
            end = Accounts.read(self.folder, left.tables["process"][0]["rank"])
            assert_sane(left, int((end.begun - end.came_back).sum()))
        if not others:
            assert_ranks_agree(first)
        for rank in range(2):
            rank_logs = [left for left in [*first, *others] if left.tables["process"][0]["rank"] == rank]
            total += assert_complete(rank_logs, self.folder, rank)
        return total


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str | None, Machine]]:
    """Yield the traced machines by recorder."""
    with Machine("python") as python, Machine("native") as native:
        yield {"python": python, "native": native}


@pytest.fixture(scope="module")
def all_machines(machines: dict[str | None, Machine]) -> Iterator[dict[str | None, Machine]]:
    """Yield all machines by recorder; None means untraced."""
    with Machine(None) as untraced:
        yield {**machines, None: untraced}


# Among thousands of alarms, some interrupt a weak reference's callback of the Python recorder, where Python drops the
# exception; the accounts then differ. tests/unit/recording/test_interrupts.py tests single alarms.
OFTEN_INTERRUPTED: Final = pytest.param("interrupted", marks=pytest.mark.exhaustive)


@pytest.mark.long
@pytest.mark.parametrize("ending", [OFTEN_INTERRUPTED if ending == "interrupted" else ending for ending in ENDINGS])
@pytest.mark.parametrize("recorder", recorders.RECORDERS)
def test_every_call_is_accounted_for(
    recorder: str, ending: str, machines: dict[str | None, Machine], tmp_path: Path
) -> None:
    outcome = machines[recorder].stress(ending, ENDINGS.index(ending), tmp_path)
    outcome.assert_ended_by_itself()
    assert outcome.assert_accounted(recorder) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_hundred_runs(all_machines: dict[str | None, Machine], tmp_path: Path) -> None:
    """Runs with each recorder and untraced ones alternate; only endings that crash untraced may crash traced."""
    crashes: dict[str | None, Counter[str]] = {name: Counter() for name in all_machines}
    calls: Counter[str | None] = Counter()
    for seed in range(RUNS):
        ending = ENDINGS[seed % len(ENDINGS)]
        for name, machine in all_machines.items():
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            outcome = machine.stress(ending, seed, folder)
            outcome.assert_ended_by_itself()
            if name is not None:
                calls[name] += outcome.assert_accounted(name)
            crashes[name][ending] += outcome.crashed
            report(f"{seed} {ending} {name or 'untraced'}: {outcome.statuses}")
    report(f"{RUNS} runs each; calls: {dict(calls)}; crashed: { {name: dict(c) for name, c in crashes.items()} }")
    for name in recorders.RECORDERS:
        for ending, number in crashes[name].items():
            assert number == 0 or crashes[None][ending] or crashes_untraced(all_machines[None], ending, tmp_path), name


def crashes_untraced(machine: Machine, ending: str, folder: Path) -> bool:
    """Return whether more untraced runs crash: gloo aborts only one in dozens of processes with work in flight."""
    for seed in range(RUNS, 2 * RUNS):
        here = folder / f"untraced-{ending}-{seed}"
        here.mkdir()
        if machine.stress(ending, seed, here).crashed:
            report(f"{ending} crashed untraced, too, in run {seed - RUNS + 1}")
            return True
    return False


def report(line: str) -> None:
    """Print the progress of a long test (pytest -s)."""
    print(line, file=sys.stderr, flush=True)


# ---- backends that give no Work --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recorder", ["python", pytest.param("native", marks=pytest.mark.exhaustive)])
def test_batches_longer_than_the_ring(recorder: str, tmp_path: Path) -> None:
    recorders.needs(recorder)
    result = processes.run(
        [sys.executable, processes.PROGRAMS / "null_works.py", null_work_folder(), "1"],
        limit=200,
        COMMTRACE=tmp_path / "log",
        COMMTRACE_RECORDER=recorder,
        COMMTRACE_RING_RECORDS=32,
        COMMTRACE_DRAIN_MS=1,
        PYTHONFAULTHANDLER=1,
    )
    assert result.status == 0, result.err[-6000:]
    left = processes.read_one(tmp_path / "log")
    stats = left.stats
    assert left.tables["process"][0]["recorder"] == recorder
    assert stats["hook_errors"] == 0, stats["first_error"]
    assert stats["calls"] == len(left.records) + stats["dropped"] == int(result.out)
    assert len(left.records) > 0
    assert (left.records["batch"] > 0).any()


# ---- the parts of the native recorder that threads share -------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("program", ["slots_race", "works_race"])
def test_no_thread_writes_where_it_must_not(program: str, sanitizer: str, tmp_path: Path) -> None:
    import torch

    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    package = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{package}/include"]
    library = [f"-L{package}/lib", "-lc10", f"-Wl,-rpath,{package}/lib"]
    source = processes.NATIVE_PROGRAMS / f"{program}.cpp"
    build = processes.run([COMPILER, *flags, source, "-o", tmp_path / program, *library], limit=240)
    if build.status and "cannot find" in build.err:
        pytest.skip(f"there is no {sanitizer} sanitizer")
    assert build.status == 0, build.err
    # Memory that is deliberately never freed is not a leak.
    result = processes.run(
        [tmp_path / program], limit=240, ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="halt_on_error=1"
    )
    assert result.status == 0, result.out + result.err


# ---- large numbers of events -----------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Run of programs/many_events.py: its output, its log, and the largest size of its records on disk."""

    parts: list[dict[str, float]]
    left: Left
    peak_bytes: int

    def growth_kib(self) -> float:
        """Return the peak memory after the first tenth of the run, minus the peak within it."""
        resident = [part["resident_kib"] for part in self.parts]
        warm = len(resident) // 10
        return max(resident[warm:]) - max(resident[:warm])


def segment_bytes(log: Path) -> int:
    """Return the current bytes of records on disk."""
    total = 0
    for path in log.glob("*/*/*.npy*"):
        with contextlib.suppress(FileNotFoundError):  # closed, and so renamed, or removed
            total += path.stat().st_size
    return total


def many(kind: str, number: int, recorder: str, log: Path, *, limit: float = 120, **settings: object) -> Run:
    """Run the program, and measure its log every few milliseconds."""
    recorders.needs(recorder)
    variables = {f"COMMTRACE_{name.upper()}": value for name, value in settings.items()}
    out = log.with_name("told")
    peak, deadline = 0, time.monotonic() + limit
    with (
        open(out, "wb") as output,
        subprocess.Popen(
            [sys.executable, str(processes.PROGRAMS / "many_events.py"), kind, str(number)],
            env=processes.environment(COMMTRACE=log, COMMTRACE_RECORDER=recorder, **variables),
            cwd=tempfile.gettempdir(),
            stdout=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            while process.poll() is None:
                peak = max(peak, segment_bytes(log))
                assert time.monotonic() < deadline, out.read_text()[-500:]
                time.sleep(0.005)
        finally:
            processes.kill_group(process.pid)
    assert process.returncode == 0
    parts = [json.loads(line) for line in out.read_text().splitlines()]
    lefts = processes.read_all(log)
    return Run(parts, lefts[-1], max(peak, segment_bytes(log)))


def assert_bounded(run: Run, number: int, recorder: str, max_bytes: int) -> None:
    """Assert that every call was written or dropped, and that disk and memory stayed within their bounds."""
    stats = run.left.stats
    assert run.left.tables["process"][0]["recorder"] == recorder
    assert stats["hook_errors"] == 0, stats["first_error"]
    assert stats["write_errors"] == stats["lost"] == 0
    assert stats["calls"] == number
    assert len(run.left.records) + stats["removed"] + stats["dropped"] == number
    assert stats["removed"] > 0
    assert run.peak_bytes <= max_bytes
    assert run.growth_kib() < 16 << 10
    numbers = np.sort(run.left.records["seq"].astype(np.int64))
    assert (np.diff(numbers) > 0).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("recorder", "number"),
    [pytest.param("python", 100_000, marks=pytest.mark.exhaustive), ("native", 500_000)],
)
def test_many_events_stay_within_bounds(recorder: str, number: int, tmp_path: Path) -> None:
    max_bytes = 4 << 20
    run = many("calls", number, recorder, tmp_path / "log", max_bytes=max_bytes, segment_min_bytes=64 << 10)
    assert_bounded(run, number, recorder, max_bytes)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_fifty_million_events_stay_within_bounds(tmp_path: Path) -> None:
    number, max_bytes = 50_000_000, 64 << 20
    run = many("calls", number, "native", tmp_path / "log", limit=7000, max_bytes=max_bytes)
    stats, last = run.left.stats, run.parts[-1]
    report(
        f"{number} calls at {number / last['seconds']:.0f} a second; on disk {len(run.left.records)}, "
        f"removed {stats['removed']}, dropped {stats['dropped']}; disk at most {run.peak_bytes} bytes of {max_bytes}; "
        f"memory {last['resident_kib']} KiB, grown by {run.growth_kib():.0f} KiB"
    )
    assert_bounded(run, number, "native", max_bytes)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "number", "most_growth_kib"),
    [
        ("groups", 10_000, 32 << 10),
        ("threads", 10_000, 8 << 10),
        ("restarts", 200, 4 << 10),
        ("codes", 100_000, 48 << 10),
    ],
)
@pytest.mark.parametrize("recorder", recorders.RECORDERS)
def test_what_a_program_uses_once_takes_little_memory(
    recorder: str, kind: str, number: int, most_growth_kib: int, tmp_path: Path
) -> None:
    """A group costs its row, a thread and a log leave nothing, and the memory for code objects is bounded."""
    run = many(kind, number, recorder, tmp_path / "log", limit=1000)
    report(f"{recorder}, {number} {kind}: grown by {run.growth_kib():.0f} KiB")
    lefts = processes.read_all(tmp_path / "log")
    assert sum(len(left.records) + left.stats["dropped"] for left in lefts) == number
    assert all(left.stats["hook_errors"] == 0 for left in lefts)
    assert len(lefts) == (number if kind == "restarts" else 1)
    assert run.growth_kib() < most_growth_kib
