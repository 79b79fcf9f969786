"""torch's analyser of flight recorder dumps and the diagnosis agree on jobs that hang, where the analyser can decide.

gloo also records into torch's flight recorder, but its dumps have neither process groups nor messages. The program
adds the groups (`programs/flight_recorder.py`), and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest
from stuck_jobs import wait_for_stuck_calls

pytest.importorskip("torch")
pytest.importorskip("torch.distributed.flight_recorder", reason="torch has no analyser of dumps")

from ranks import Nursery
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dump

SIZE = 3


class Verdict(NamedTuple):
    """Verdict on a collective: name, number in its group from 0, missing ranks, differing ranks, and what differs."""

    op: str
    number: int
    missing: tuple[int, ...]
    differing: tuple[int, ...]
    difference: str


KINDS = {
    "absent": [Verdict("all_reduce", 5, (1,), (), "")],
    "subgroup": [Verdict("all_reduce", 5, (1,), (), "")],
    "order": [Verdict("all_reduce", 0, (0, 2), (), ""), Verdict("all_reduce", 0, (1,), (), "")],
    "operation": [Verdict("all_reduce", 5, (), (1,), "operation")],
    "swapped": [Verdict("all_gather", 5, (), (1,), "operation")],
    "size": [Verdict("all_reduce", 5, (), (1,), "size")],
    "dtype": [Verdict("all_reduce", 5, (), (1,), "size")],  # 512 float64 and 1,024 float32: elements are compared first
}
UNDECIDED = ("root", "receive", "send", "tag", "cycle")
"""Kinds in which the analyser finds nothing: dumps have no roots, and gloo's have no messages."""
DEFAULT = ("absent", "size", "root")
DIFFERENCES = {"COLLECTIVE_TYPE_MISMATCH": "operation", "SIZE_OR_SYNTAX_MISMATCH": "size"}


@pytest.mark.long
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in DEFAULT else pytest.mark.exhaustive) for kind in (*KINDS, *UNDECIDED)],
)
def test_the_verdicts_agree(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    ranks = nursery.start("flight_recorder", tmp_path / "log", kind, dumps, ranks=SIZE)
    calls = wait_for_stuck_calls(tmp_path / "log")
    (dumps / "now").touch()
    processes.wait_for(lambda: len([*dumps.glob("rank_*")]) == SIZE, 60)
    calls = wait_for_stuck_calls(tmp_path / "log")
    ranks.kill(*range(SIZE))
    ranks.wait()
    assert analysed(dumps) == KINDS.get(kind, [])
    if kind in KINDS:
        assert sorted(map(recorded, calls.itertuples())) == [
            expected._replace(difference="dtype") if kind == "dtype" else expected for expected in KINDS[kind]
        ]


def analysed(folder: Path) -> list[Verdict]:
    """Return the analyser's verdicts."""
    options: Any = JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"])
    details: Any = {file.name: read_dump("rank_", str(file)) for file in folder.glob("rank_*")}
    database = build_db(details, options, next(iter(details.values()))["version"])
    return sorted(
        Verdict(
            collective.collective_name.removeprefix("gloo:"),
            collective.collective_seq_id - 1,
            tuple(sorted(collective.missing_ranks or ())),
            tuple(sorted(differing(collective))),
            "".join(DIFFERENCES[mismatch.type_of_mismatch.state.name] for mismatch in differing(collective).values()),
        )
        for collective in database.collectives
        if collective.missing_ranks or not collective.pass_check
    )


def differing(collective: Any) -> dict[int, Any]:
    return collective.mismatch_collectives or {}


def recorded(call: Any) -> Verdict:
    """Return the verdict of a `stuck_calls` row, without what absent ranks wait for: the analyser does not say it."""
    absent = tuple(rank for rank in range(SIZE) if str(rank) in call.absent_ranks)
    difference, _, values = call.disagreement.partition(": ")
    if difference in ("", "order"):
        return Verdict(call.op, call.seq, absent, (), "")
    op = values.split()[0] if difference == "operation" else call.op  # that of rank 0
    return Verdict(op, call.seq, absent, (1,) if values.endswith("on rank 1") else (), difference)
