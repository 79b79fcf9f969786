"""Assertions that theory and the log of a training agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trainings

from commtrace.analyses.compare import rules_analysis
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.run import Run
from commtrace.theory import predict

Runs = Callable[[], Mapping[str, Run]]


@functools.cache
def tables(of: Runs, name: str) -> NamedTables:
    """Return the theory tables of one training."""
    return fold(of()[name], [rules_analysis.ANALYSIS])


def assert_exact(found: NamedTables, run: Run) -> None:
    """Assert that every call is expected on each rank in each step, and that the waterfall adds up exactly."""
    by_rank, cells, bars = found["theory"], found["reconciliation"], found["waterfall"]
    assert by_rank["not_predicted"].isna().all(), by_rank["not_predicted"].tolist()
    assert sorted(by_rank["rank"]) == run.ranks
    starts = {-1} if (found["expected"]["step"] == -1).any() else set()  # FSDP sends nothing before its first step
    assert {*starts, 0, 1, 2} <= set(cells["step"])
    assert set(cells["cause"]) == {"expected"}, cells.loc[cells["cause"] != "expected"].to_string()
    events = run.events()
    recorded_bytes = events.groupby("rank")["payload_bytes"].sum()
    assert by_rank.set_index("rank")["matched_bytes"].to_dict() == recorded_bytes.to_dict()
    assert (by_rank["expected_bytes"] == by_rank["measured_bytes"]).all()
    assert (by_rank["matched_share"] == 1).all()
    assert [*bars["kind"]][0 :: len(bars) - 1] == ["closed form", "measured"]
    assert set(bars["kind"][1:-1]) <= {"cause"}
    assert bars["bytes"][:-1].sum() == bars["bytes"].iloc[-1]
    step = events.loc[(events["rank"] == 0) & (events["step"] == events["step"].max())]
    assert bars["bytes"].iloc[-1] == round(step["wire_bytes"].sum())


def assert_described(training: dict[str, Any], run: Run, folder: Path) -> None:
    """Assert that theory predicts the same from a training's configuration as from its run."""
    planned, captured = trainings.described(training, len(run.ranks), folder), dict(run.job or {})
    assert predict(planned) == predict(captured)
    if planned.get("zero_stage") == 0:
        del planned["optimizer"]  # its wrapper communicates nothing
    zero, captured_zero = planned.pop("zero", {}), captured.pop("zero", {})
    assert zero == {key: value for key, value in captured_zero.items() if key in zero}
    assert planned == {key: value for key, value in captured.items() if key in planned}
