"""Dry runs of test programs, and the assertion that they equal the real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pandas as pd
import processes
import trainings

from commtrace.run import Run, open_run
from commtrace.schema import EVENT_COLUMNS

LIMIT_SECONDS: Final = 300

SAME: Final = [
    name for name in EVENT_COLUMNS if not name.endswith("_ns") and name not in ("state", "flags") and name != "group"
]
"""Columns of the event table in which a dry run and a real one must be equal, call by call."""


def calls(run: Run) -> pd.DataFrame:
    """Return all calls of a run, by rank and in their order."""
    events = run.events()
    flags = [
        "|".join(flag for flag in str(text).split("|") if flag not in ("simulated", "")) for text in events["flags"]
    ]
    return events[SAME].astype(object).assign(flags=flags).fillna("missing")


def assert_same(real: Run, dry: Run) -> None:
    """Assert that each rank made the same calls in both runs, and that there are calls."""
    expected, found = calls(real), calls(dry)
    assert sorted(set(found["rank"])) == sorted(set(expected["rank"]))
    assert len(expected)
    for rank, real_calls in expected.groupby("rank"):
        dry_calls = found.loc[found["rank"] == rank]
        for (_, real_call), (_, dry_call) in zip(real_calls.iterrows(), dry_calls.iterrows(), strict=False):
            assert real_call.to_dict() == dry_call.to_dict()
        assert len(dry_calls) == len(real_calls), f"rank {rank}"


def simulated(program: str, folder: Path, world: int, *arguments: object, small: int) -> None:
    """Run a program of `tests/support/programs` as every rank of a dry run.

    Tensors of up to `small` elements are computed. The program starts its logs itself.
    """
    mail = folder / "mail"
    mail.mkdir(parents=True)
    path = processes.PROGRAMS / f"{program}.py"
    started = trainings.parent().start(
        "simulate", folder / "log", small, world, mail, path, *arguments, ranks=1, traced=False
    )
    assert started.wait(LIMIT_SECONDS) == [0], started.output(0)[-4000:]


def trained(wanted: dict[str, dict[str, Any]], folder: Path, world: int, small: int) -> dict[str, Run]:
    """Do dry runs of what `trainings.train` trains."""
    folder.mkdir(parents=True, exist_ok=True)
    orders = folder / "orders.json"
    orders.write_text(json.dumps([trainings._order(folder, name, training) for name, training in wanted.items()]))
    simulated("theory", folder / "simulated", world, orders, small=small)
    return {name: open_run(folder / name) for name in wanted}
