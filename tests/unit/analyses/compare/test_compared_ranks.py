"""Equivalent ranks and steps are compared with theory once, so that more of them cost no more comparisons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import damaged_logs
import numpy as np
import pytest
from repeated_logs import Repetition, write_repeated

from commtrace.analyses.compare import compared_ranks, rules_analysis, rules_run
from commtrace.analyses.fold_engine import fold
from commtrace.run import open_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of recorded logs, of two ranks each."""
    folder = tmp_path_factory.mktemp("recorded")
    damaged_logs.unpack(folder)
    return folder


def long_log(recorded: Path, scheme: str, folder: Path, **repetition: Any) -> Path:
    """Write a log that repeats the recorded log of a scheme, and return its directory."""
    write_repeated(recorded / scheme, folder, Repetition(**repetition))
    return folder


@pytest.mark.parametrize("scheme", damaged_logs.SCHEMES)
def test_a_repeated_log_is_as_expected(scheme: str, recorded: Path, tmp_path: Path) -> None:
    run = open_run(long_log(recorded, scheme, tmp_path, ranks=4, repeats=70, per_host=2))
    tables = fold(run, [rules_analysis.ANALYSIS])
    assert tables["theory"]["matched_share"].tolist() == [1.0] * 4
    assert set(tables["reconciliation"]["cause"]) == {"expected"}
    cells = tables["reconciliation"].groupby("rank")["step"].agg(["min", "max"])
    assert set(cells["max"]) == {71}


@pytest.mark.parametrize(("ranks", "repeats"), [(2, 80), (6, 300)])
def test_comparisons_do_not_grow_with_ranks_and_steps(
    ranks: int, repeats: int, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for module, name in ((rules_run, "predict"), (compared_ranks, "compare_step")):
        function = getattr(module, name)

        def counted(*arguments: Any, name: str = name, function: Any = function) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)
    log = long_log(recorded, "ddp", tmp_path, ranks=ranks, repeats=repeats, together=True)
    tables = fold(open_run(log), [rules_analysis.ANALYSIS])
    # Start-up, the first two steps, the other steps with sizes, and those without.
    assert calls == {"predict": 1, "compare_step": 5}
    for name in ("expected", "reconciliation"):
        by_rank = [table.drop(columns="rank").reset_index(drop=True) for _, table in tables[name].groupby("rank")]
        assert len(by_rank) == ranks
        assert all(table.equals(by_rank[0]) for table in by_rank)
        assert set(by_rank[0]["step"]) == {*range(-1, repeats + 2)}


def test_steps_whose_records_were_removed_are_not_compared(recorded: Path, tmp_path: Path) -> None:
    log = long_log(recorded, "ddp", tmp_path, ranks=2, repeats=300, removed=250)
    for path in log.rglob("*.npy"):  # a call of start-up that was never waited for is written at the end
        records = np.load(path)
        late = records[:1].copy()
        late["step"] = -1
        np.save(path, np.concatenate([records, late]))
    run = open_run(log)
    cells = fold(run, [rules_analysis.ANALYSIS])["reconciliation"]
    assert {*cells["cause"]} == {"expected"}
    # The first 16 records are of steps 252 to 257, any of which may be incomplete.
    assert {*cells["step"]} == {*range(258, 302)}
    assert run.processes[1].losses == "the first 762 of 912 calls were removed to keep the log below its limit"
