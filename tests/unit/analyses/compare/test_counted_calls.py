"""The measured calls of each step are those of its records, although the table has only steps where calls change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, ALL_REDUCE, BARRIER, WORLD, LogFactory, Records, record
from record_blocks import block_of

from commtrace.analyses.compare import counted_calls as measured
from commtrace.analyses.compare.call_keys import SUMMED
from commtrace.analyses.compare.counted_calls import DETAILED_STEPS
from commtrace.run import Run, open_run

RANKS, STEPS = 3, DETAILED_STEPS + 40
OPS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", BARRIER: "barrier"}


def training(rng: np.random.Generator) -> Records:
    """Return calls in random order; most steps have the same calls as the step before."""
    patterns = [[(rng.choice([*OPS]), 8 * rng.integers(0, 3)) for _ in range(rng.integers(0, 5))] for _ in range(3)]
    rows, pattern = [record(step=-1)], patterns[0]
    for step in range(rng.integers(1, STEPS)):
        if rng.random() < 0.1:
            pattern = patterns[rng.integers(len(patterns))]
        rows += [record(step=step, kind=int(kind), payload=int(payload)) for kind, payload in pattern]
    return rng.permutation(np.concatenate(rows))


def table_of(run: Run, records: list[Records], rng: np.random.Generator) -> pd.DataFrame:
    """Return the merged table of blocks that begin at random records."""
    blocks = [
        block_of(run, block, rank)
        for rank, rank_records in enumerate(records)
        for block in np.split(rank_records, np.sort(rng.integers(0, len(rank_records), 3)))
    ]
    first, *rest = [measured.partial(blocks[number]) for number in rng.permutation(len(blocks))]
    table = measured.merge([first, measured.merge(rest)])
    return table.assign(
        **{name: run.labels.distinct(name)[table[name]] for name in ("role", "op", "phase", "site", "dtype")}
    )


def counted(calls: Records) -> Counter[tuple[str, int]]:
    """Count calls by operation and payload; the payload is kept only in the first steps."""
    payload = np.where(calls["step"] < DETAILED_STEPS, calls["payload"], SUMMED)
    return Counter((OPS[kind], size) for kind, size in zip(calls["kind"].tolist(), payload.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_its_calls(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    log = LogFactory(tmp_path)
    for rank in range(RANKS):
        log.process(rank, world_size=RANKS).known({WORLD: [*range(RANKS)]})
    run = open_run(tmp_path)
    records = [training(rng) for _ in range(RANKS)]
    table = table_of(run, records, rng)
    contents, calls_by_rank = measured.count_steps(table, run.labels, RANKS)
    for rank, rank_records in enumerate(records):
        assert calls_by_rank[rank].last_step == rank_records["step"].max()
        steps = np.arange(-1, STEPS)
        by_step = rank_records[np.argsort(rank_records["step"], kind="stable")]
        begins = np.searchsorted(by_step["step"], np.arange(-1, STEPS + 1))
        for number, index in enumerate(calls_by_rank[rank].at(steps).tolist()):
            calls = by_step[begins[number] : begins[number + 1]]
            equal = contents[index].calls
            assert {(same.key.op, same.key.payload): same.calls for same in equal} == counted(calls)
            assert sum(same.bytes for same in equal) == calls["payload"].sum()
            assert bool(index) == bool(len(calls))
    assert len(table) < sum(map(len, records))
    assert len({frozenset(step.calls) for step in contents}) == len(contents)
