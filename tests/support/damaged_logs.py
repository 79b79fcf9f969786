"""Damaged logs: recorded logs of five schemes, in both formats, with seeded damage, and every command on each of them.

python tests/support/damaged_logs.py --count 100000 --seed 1     # prints failures

Each log is opened by one command, less often by `report`, which takes far more time than the others. `--every` runs all
commands on each log, `--only NAME` some of them. A damaged log is a function of its seed, so a long run can be split.

A command must end within limits of time and memory, with a report or one clear line; stderr may have only lines
`commtrace: ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import log_versions
import numpy as np

import commtrace
from commtrace.cli import main
from commtrace.errors import LogError
from commtrace.schema import RECORD

SECONDS: Final = 10
"""Limit of a command's CPU time, which does not depend on other programs on the machine."""
WAITING_SECONDS: Final = 200
MEMORY: Final = 1 << 30
ADDRESS_SPACE: Final = 8 << 30
"""Limit at which allocation fails, so that one bad log does not use up the machine's memory."""
SCHEMES: Final = ("ddp", "fsdp", "pipeline", "zero1", "zero3")

_RECORDED: Final = Path(__file__).with_name("recorded") / "logs.zip"
_NUMBERS: Final = (0, -1, 1, 3, 255, 30_000_000, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63))
_VALUES: Final[tuple[Any, ...]] = (
    *_NUMBERS, 1 << 64, 10**30, 1.5, 1e308, float("inf"), float("nan"), None, True, "", "7", "\ud800", "0-99999999999",
    "0-1048575", "0-1048574:2", "1,0", [], [0], [[]], {}, {"": None},
)  # fmt: skip


def unpack(folder: Path) -> None:
    """Write the logs of SCHEMES, with two ranks each, in version 1 of the format."""
    with zipfile.ZipFile(_RECORDED) as archive:
        archive.extractall(folder)


def damage(log: Path, others: Path, chance: random.Random) -> list[str]:
    """Damage one to three places of a log, and return what was done. `others`: logs from which parts may be copied."""
    done = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        files = _files(log)
        if not files:
            break
        how = chance.choice(_DAMAGES)
        with contextlib.suppress(ValueError):  # earlier damage has left nothing to damage in this way
            done.append(f"{how.__name__}: {how(chance.choice(files), others, chance)}")
    return done


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flip_bytes(path: Path, others: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    places = [chance.randrange(len(data)) for _ in range(chance.choice((1, 1, 4, 32)))]
    for place in places:
        data[place] ^= chance.randrange(1, 256)
    path.write_bytes(data)
    return f"{path.name} at {places}"


def _set_fields(path: Path, others: Path, chance: random.Random) -> str:
    path = _sibling(path, ".npy", chance)
    header, records = _split(path)
    name = chance.choice(RECORD.names or ())
    rows = chance.choice(([chance.randrange(len(records))], range(0, len(records), 3), range(len(records))))
    limits = np.iinfo(RECORD[name])
    value = max(limits.min, min(limits.max, chance.choice(_NUMBERS)))
    records[name][[*rows]] = value
    path.write_bytes(header + records.tobytes())
    return f"{path.name} {name} = {value} in {len(rows)} records"


def _mix_records(path: Path, others: Path, chance: random.Random) -> str:
    path = _sibling(path, ".npy", chance)
    header, records = _split(path)
    picked = [chance.randrange(len(records)) for _ in records]
    path.write_bytes(header + records[picked].tobytes())
    return path.name


def _set_value(path: Path, others: Path, chance: random.Random) -> str:
    path = _sibling(path, ".jsonl", chance)
    lines = path.read_bytes().splitlines()
    number = chance.randrange(len(lines))
    row = json.loads(lines[number])
    places = [*_places(row)]
    if not places:
        raise ValueError
    container, key = chance.choice(places)
    container[key] = chance.choice(_VALUES)
    lines[number] = json.dumps(row).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{path.name}:{number + 1} {key} = {container[key]!r}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a JSON value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*pairs]:
        yield value, key
        yield from _places(part)


def _mix_lines(path: Path, others: Path, chance: random.Random) -> str:
    path = _sibling(path, ".jsonl", chance)
    lines = path.read_bytes().splitlines()
    foreign = _sibling(chance.choice(_files(others)), ".jsonl", chance).read_bytes().splitlines()
    how = chance.choice(("shuffled", "repeated", "replaced", "removed"))
    if how == "shuffled":
        chance.shuffle(lines)
    for number in [chance.randrange(len(lines)) for _ in range(chance.choice((1, 3)))]:
        if how == "repeated":
            lines.insert(chance.randrange(len(lines)), lines[number])
        elif how == "replaced":
            lines[number] = chance.choice((*foreign, b"", b"{}", b"[1]", b"null", b"\xff\x00", b'{"table": "stats"}'))
        elif how == "removed" and lines:
            del lines[number % len(lines)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{path.name} {how}"


def _cut(path: Path, others: Path, chance: random.Random) -> str:
    size = chance.randrange(path.stat().st_size + 1)
    os.truncate(path, size)
    return f"{path.name} after {size}"


def _replace(path: Path, others: Path, chance: random.Random) -> str:
    other = chance.choice(_files(others))
    shutil.copy(other, path)
    return f"{path.name} by {other}"


def _swap(path: Path, others: Path, chance: random.Random) -> str:
    other = chance.choice(_files(path.parent))
    before = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(before)
    return f"{path.name} and {other.name}"


def _remove(path: Path, others: Path, chance: random.Random) -> str:
    path.unlink()
    return path.name


def _rename(path: Path, others: Path, chance: random.Random) -> str:
    rank, number = chance.choice((0, 1, 7, 99999999999)), chance.choice((0, 1, 99999999999))
    suffix = chance.choice((".jsonl", f".{number:05d}.npy", f".{number:05d}.npy.open", ".salvaged.npy"))
    other = path.with_name(f"rank{rank:05d}-{chance.choice((11400, 99999999999))}{suffix}")
    path.rename(other)
    return f"{path.name} to {other.name}"


_DAMAGES: Final[tuple[Callable[[Path, Path, random.Random], str], ...]] = (
    *(_flip_bytes, _set_fields, _set_fields, _set_value, _set_value, _mix_lines, _mix_records),
    *(_cut, _replace, _swap, _remove, _rename),
)


def _sibling(path: Path, suffix: str, chance: random.Random) -> Path:
    """Return a file with this suffix, not empty, from the directory of another file."""
    files = [file for file in _files(path.parent) if file.suffix == suffix and file.stat().st_size]
    if not files:
        raise ValueError
    return chance.choice(files)


def _split(path: Path) -> tuple[bytes, Any]:
    """Return the header and the records of a segment."""
    data = path.read_bytes()
    offset = 10 + int.from_bytes(data[8:10], "little")
    records = np.frombuffer(data[offset:], RECORD, max(len(data) - offset, 0) // RECORD.itemsize).copy()
    if not len(records):
        raise ValueError
    return data[:offset], records


def commands(log: Path, undamaged: Path, reference: Path, out: Path) -> dict[str, Callable[[], None]]:
    """Return every command that opens a log, by name; `reference` is a log of more ranks."""
    arguments = {
        "report": ("report", log),
        "report all": ("report", log, "--sections", "all", "--sites", 0),
        "report json": ("report", log, "--json"),
        "report html": ("report", log, "--html", out / "page.html", "--force"),
        "report several": ("report", log, undamaged),
        "top": ("top", log, "--once"),
        "metrics": ("metrics", log, "--tensorboard", out / "events"),
        "metrics now": ("metrics", log, "--openmetrics", "-"),
        "check": ("check", log),
        "check strict": ("check", log, "--strict", "--tolerance", "0.1"),
        "check against": ("check", undamaged, "--against", log),
        "baseline": ("check", log, "--update-baseline", out / "baseline"),
        "diff": ("diff", log, undamaged),
        "diff json": ("diff", undamaged, log, "--json"),
        "export csv": ("export", log, "--out", out / "events.csv", "--force"),
        "export parquet": ("export", log, "--out", out / "events.parquet", "--force"),
        "export perfetto": ("export", log, "--out", out / "events.pftrace", "--force"),
        "scaling": ("scaling", log, reference),
        "scaling json": ("scaling", reference, log, "--json"),
        "whatif": ("whatif", log, "--required-bandwidth"),
        "whatif json": ("whatif", log, "--json"),
        "recover": ("recover", log),
    }
    runs = {name: functools.partial(_run, tuple(map(str, words))) for name, words in arguments.items()}
    return {**runs, "events": functools.partial(_events, log)}


def _weight(command: str) -> int:
    return 1 if command.startswith("report") else 4


def _events(log: Path) -> None:
    with contextlib.suppress(LogError):
        commtrace.open(log).events()


def _run(arguments: tuple[str, ...]) -> None:
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = main(arguments)
    lines = errors.getvalue().splitlines()
    foreign = [line for line in lines if not line.startswith("commtrace: ")]
    assert not foreign, "\n".join(foreign)
    assert status in (0, 1, 2, 3), status
    assert printed.getvalue() or (status == 2 and lines), "neither a report nor a reason"
    printed.getvalue().encode()
    if "--json" in arguments and status != 2:
        json.loads(printed.getvalue(), parse_constant=_not_json)


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} in a JSON document")


class _TooLong(BaseException):
    """A command did not end in time."""


def _alarm(signum: int, frame: object) -> None:
    raise _TooLong


def failures(count: int, seed: int, only: Sequence[str] = (), *, every: bool = False) -> Iterator[str]:
    """Damage logs, run a command on each (one of `only` if given; `every`: all of them), and yield what fails."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warnings.simplefilter("always")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        log, out = folder / "log", folder / "out"
        versions = [folder / "version 1", folder / "version 2"]
        for intact in versions:
            unpack(intact)
        log_versions.to_version_2(versions[1])
        out.mkdir()
        reference = folder / "reference"
        _reference(reference)
        for number in range(seed, seed + count):
            chance = random.Random(number)
            scheme, intact = chance.choice(SCHEMES), chance.choice(versions)
            shutil.rmtree(log, ignore_errors=True)
            shutil.copytree(intact / scheme, log)
            done = damage(log, intact, chance)
            chosen = commands(log, intact / scheme, reference, out)
            names = [*(only or chosen)]
            for name in names if every else chance.choices(names, [*map(_weight, names)]):
                before = _peak()
                _set_timers(SECONDS, WAITING_SECONDS)
                try:
                    chosen[name]()
                    _set_timers(0, 0)
                    assert _peak() <= max(MEMORY, before), f"{_peak() >> 20} MiB of memory"
                except (Exception, _TooLong, SystemExit):
                    _set_timers(0, 0)
                    yield f"seed {number}, {scheme}, {intact.name}, {name}: {done}\n{traceback.format_exc()}"


def _set_timers(cpu_seconds: int, seconds: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _reference(folder: Path) -> None:
    """Write a log of three ranks, for the scaling report."""
    from factory import training

    training(folder, ranks=3, steps=6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    number_of_failures = 0
    for failure in failures(given.count, given.seed, given.only, every=given.every):
        number_of_failures += 1
        print(failure, flush=True)
    print(f"{given.count} damaged logs from seed {given.seed}: {number_of_failures} failures, peak {_peak() >> 20} MiB")
    sys.exit(bool(number_of_failures))
