"""What it means that theory and the log of a training agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trainings

from commtrace.analyses import reconciliation
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.run import Run
from commtrace.theory import predict

Runs = Callable[[], Mapping[str, Run]]


@functools.cache
def tables(of: Runs, name: str) -> NamedTables:
    """The tables of theory of one training."""
    return fold(of()[name], [reconciliation.ANALYSIS])


def assert_exact(found: NamedTables, seen: Run) -> None:
    """Nothing is left over on any rank in any step, and the sum from the formula to the log is exact."""
    told, cells, bars = found["theory"], found["reconciliation"], found["waterfall"]
    assert told["not_predicted"].isna().all(), told["not_predicted"].tolist()
    assert sorted(told["rank"]) == seen.ranks
    starts = {-1} if (found["expected"]["step"] == -1).any() else set()  # FSDP sends nothing before its first step
    assert {*starts, 0, 1, 2} <= set(cells["step"])
    assert set(cells["cause"]) == {"expected"}, cells.loc[cells["cause"] != "expected"].to_string()
    events = seen.events()
    by_rank = events.groupby("rank")["payload_bytes"].sum()
    assert told.set_index("rank")["matched_bytes"].to_dict() == by_rank.to_dict()
    assert (told["expected_bytes"] == told["measured_bytes"]).all()
    assert (told["matched_share"] == 1).all()
    assert [*bars["kind"]][0 :: len(bars) - 1] == ["closed form", "measured"]
    assert set(bars["kind"][1:-1]) <= {"cause"}
    assert bars["bytes"][:-1].sum() == bars["bytes"].iloc[-1]
    step = events.loc[(events["rank"] == 0) & (events["step"] == events["step"].max())]
    assert bars["bytes"].iloc[-1] == round(step["wire_bytes"].sum())


def assert_described(one: dict[str, Any], run: Run, folder: Path) -> None:
    """Theory has from a training's configuration what it has from the training."""
    told, captured = trainings.described(one, len(run.ranks), folder), dict(run.job or {})
    assert predict(told) == predict(captured)
    if told.get("zero_stage") == 0:
        del told["optimizer"]  # whatever is around it communicates nothing
    zero, known = told.pop("zero", {}), captured.pop("zero", {})
    assert zero == {key: value for key, value in known.items() if key in zero}
    assert told == {key: value for key, value in captured.items() if key in told}
