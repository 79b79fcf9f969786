"""Baseline: a text file with the expected calls of a run, for version control.

    commtrace-baseline 1
    # calls operation bytes type reduction phase dimension group peer call-site
    world-size 8
    version torch 2.13.0
    own train.py log_loss

    ranks 0-7 start-up
     1 broadcast 1024 float32 - init data 8 root=0 torch/distributed/utils.py _sync_params_and_buffers
     order data 8 3f9a1c27be01

    ranks 0-7 steps 0-4,6-9
     1 all_reduce 26214400 float32 sum backward data 8 - train.py main
     ...

The calls of equal ranks and steps are written once, below one or more `ranks` lines. `own` lines
are patterns of call sites that are not compared. `order` lines have a digest of the order of the
calls in a group. The same run always gives the same file, which contains no times and no absolute
paths.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.errors import CommtraceError
from commtrace.rank_ranges import format_missing, format_ranks, parse_ranks

from .call_keys import CallKey
from .own_calls import is_declared
from .run_calls import NO_CALLS, START_UP, Call, GroupLabel, RankCalls, RunCalls, StepCalls, periods

_HEAD: Final = "commtrace-baseline 1"
_COLUMNS: Final = "# calls operation bytes type reduction phase dimension group peer call-site"
_START_UP: Final = "start-up"
_Place: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Ranks, and their steps."""


class BaselineError(CommtraceError):
    """A file is not a baseline, or a run cannot become one."""


@dataclass(frozen=True)
class Baseline:
    """Contents of a baseline file."""

    run: RunCalls
    own: tuple[str, ...]
    """Patterns of call sites that are not compared."""


def to_text(run: RunCalls, own: Sequence[str]) -> str:
    """Return the baseline of a run.

    Args:
        run: Its calls, without those of `own`.
        own: Patterns of call sites that are not compared.

    Raises:
        BaselineError: The run is not complete.
    """
    if run.step_ranges:
        raise BaselineError(f"{run.name}: was recorded with COMMTRACE_STEPS; give a run with all steps")
    missing = format_missing(run.ranks, run.world_size or 0)
    incomplete = [rank for rank, calls in run.ranks.items() if calls.losses or calls.problem or not calls.ended]
    if incomplete or not run.ranks or (missing and not run.partial):
        ranks = format_ranks(incomplete) or missing
        reason = f"rank {ranks} lost records, did not exit cleanly, left no log or has hook errors"
        raise BaselineError(f"{run.name}: no baseline can be made, because {reason}; give a complete run")
    return "\n".join([*_head(run, own), *_blocks(run)]) + "\n"


def _head(run: RunCalls, own: Sequence[str]) -> Iterator[str]:
    yield from (_HEAD, _COLUMNS)
    if run.world_size:
        yield f"world-size {run.world_size}"
    yield from (f"{name} {value}" for name, value in sorted(run.facts.items()) if name.startswith("version "))
    yield from (f"own {pattern}" for pattern in sorted({*own}))


def _blocks(run: RunCalls) -> Iterator[str]:
    """Yield the lines of each distinct step, sorted by its first step and rank."""
    ranks_by_content: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for ranks, calls in _equal_ranks(run):
        numbers = np.arange(START_UP, calls.last_step + 1)
        contents = calls.at(numbers)
        for content in {*contents.tolist()} - {0}:
            ranks_by_content[content][tuple(numbers[contents == content].tolist())] += ranks
    firsts = {
        content: min((steps[0], min(ranks)) for steps, ranks in by_steps.items())
        for content, by_steps in ranks_by_content.items()
    }
    for content in sorted(firsts, key=firsts.__getitem__):
        yield ""
        for steps, ranks in sorted(ranks_by_content[content].items()):
            training = [step for step in steps if step >= 0]
            if steps[0] < 0:
                yield f"ranks {format_ranks(ranks)} {_START_UP}"
            if training:
                yield f"ranks {format_ranks(ranks)} steps {format_ranks(training)}"
        counts: Counter[tuple[CallKey, str]] = Counter()  # of calls for any purpose
        for equal in run.contents[content].calls:
            counts[equal.key, equal.site] += equal.calls
        for (key, site), count in counts.items():
            yield f" {count} {' '.join(map(str, key))} {site}"
        for (role, group), digest in sorted(run.contents[content].orders.items()):
            yield f" order {role} {group} {digest}"


def _equal_ranks(run: RunCalls) -> Iterator[tuple[list[int], RankCalls]]:
    """Yield the ranks with equal calls, and their calls."""
    equal: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for rank, calls in run.ranks.items():
        equal[calls.first.tobytes(), calls.content.tobytes()].append(rank)
    yield from ((ranks, run.ranks[ranks[0]]) for ranks in equal.values())


def read_baseline(path: Path, own: Sequence[str] = ()) -> Baseline:
    """Read a baseline.

    Args:
        path: The file.
        own: Patterns of call sites that are not compared, besides those of the file.

    Raises:
        BaselineError: The file cannot be read, is not a baseline, or has calls of these patterns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(
            f"{path}: cannot be read ({error}); `commtrace check DIR --update-baseline {path}` writes it"
        ) from None
    if lines[:1] != [_HEAD]:
        raise BaselineError(f"{path}: not a baseline of this version, which begins with {_HEAD!r}")
    parser = _Parser()
    for number, line in enumerate(lines[1:], 2):
        try:
            parser.read(line)
        except (ValueError, IndexError, TypeError):
            raise BaselineError(
                f"{path}: line {number} cannot be read: {line.strip()!r}; write the file again"
            ) from None
    patterns = [*parser.own, *own]
    for call in parser.calls:
        if pattern := next((own for own in patterns if is_declared([own], call.key.phase, call.site)), None):
            raise BaselineError(
                f"{path}: has calls of {call.site}, which {pattern!r} declares as the program's own; "
                f"write the file again: commtrace check DIR --update-baseline {path} --own '{pattern}'"
            )
    return Baseline(parser.run(str(path)), tuple(parser.own))


class _Parser:
    def __init__(self) -> None:
        self.own: list[str] = []
        self.calls: set[Call] = set()
        self._world_size: int | None = None
        self._facts: dict[str, str] = {}
        self._blocks: list[tuple[list[_Place], dict[Call, int], dict[GroupLabel, str]]] = []

    def read(self, line: str) -> None:
        """Read a line below the header."""
        word, _, rest = line.strip().partition(" ")
        if word == "ranks":
            self._add_place(*rest.split())
        elif word == "own":
            self.own.append(rest)
        elif word == "world-size":
            self._world_size = int(rest)
        elif word == "version":
            name, version = rest.split(" ", 1)
            self._facts[f"version {name}"] = version
        elif word == "order":
            role, group, digest = rest.split()
            self._blocks[-1][2][role, group] = digest
        elif word and not word.startswith("#"):
            op, payload, dtype, reduce_op, phase, role, group, peer, site = rest.split(" ", 8)
            call = Call(CallKey(op, int(payload), dtype, reduce_op, phase, role, group, peer), site)
            self._blocks[-1][1][call] = int(word)
            self.calls.add(call)

    def _add_place(self, ranks: str, what: str, steps: str = "") -> None:
        if not self._blocks or self._blocks[-1][1]:  # the first place of a block
            self._blocks.append(([], {}, {}))
        if what not in ("steps", _START_UP):
            raise ValueError(what)
        place = parse_ranks(ranks), [START_UP] if what == _START_UP else parse_ranks(steps)
        self._blocks[-1][0].append(place)

    def run(self, name: str) -> RunCalls:
        """Return the run that was read."""
        contents = [NO_CALLS, *(StepCalls.of(counts, orders) for _, counts, orders in self._blocks)]
        steps: dict[int, dict[int, int]] = defaultdict(dict)
        for number, (places, _, _) in enumerate(self._blocks, 1):
            for place_ranks, place_steps in places:
                for rank in place_ranks:
                    steps[rank] |= dict.fromkeys(place_steps, number)
        ranks = {
            rank: RankCalls(*periods(*_sorted_steps(contents_of_rank))) for rank, contents_of_rank in steps.items()
        }
        facts = self._facts | ({"world size": str(self._world_size)} if self._world_size else {})
        partial = self._world_size is not None and len(ranks) < self._world_size
        return RunCalls(name, contents, ranks, self._world_size, partial, facts)


def _sorted_steps(contents: Mapping[int, int]) -> tuple[Array, Array]:
    """Return steps, ascending, and the content of each."""
    numbers = np.array(sorted(contents.items()), np.int64).reshape(-1, 2)
    return numbers[:, 0], numbers[:, 1]
