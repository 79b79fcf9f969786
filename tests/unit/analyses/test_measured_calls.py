"""The measured calls of each step are those of its records, though the table names steps only where calls change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, ALL_REDUCE, BARRIER, WORLD, LogFactory, Records, record
from record_blocks import block_of

from commtrace.analyses.reconciliation import measured_calls as measured
from commtrace.analyses.reconciliation.measured_calls import DETAILED_STEPS
from commtrace.run import Run, open_run

RANKS, STEPS = 3, DETAILED_STEPS + 40
OPS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", BARRIER: "barrier"}


def training(draw: np.random.Generator) -> Records:
    """Calls in an order that is not that of their steps, most of them the same in step after step."""
    patterns = [[(draw.choice([*OPS]), 8 * draw.integers(0, 3)) for _ in range(draw.integers(0, 5))] for _ in range(3)]
    rows, pattern = [record(step=-1)], patterns[0]
    for step in range(draw.integers(1, STEPS)):
        if draw.random() < 0.1:
            pattern = patterns[draw.integers(len(patterns))]
        rows += [record(step=step, kind=int(kind), payload=int(payload)) for kind, payload in pattern]
    return draw.permutation(np.concatenate(rows))


def table_of(run: Run, records: list[Records], draw: np.random.Generator) -> pd.DataFrame:
    """The merged table of blocks that begin anywhere."""
    blocks = [
        block_of(run, block, rank)
        for rank, of_rank in enumerate(records)
        for block in np.split(of_rank, np.sort(draw.integers(0, len(of_rank), 3)))
    ]
    first, *rest = [measured.partial(blocks[number]) for number in draw.permutation(len(blocks))]
    table = measured.merge([first, measured.merge(rest)])
    return table.assign(**{name: run.labels.distinct(name)[table[name]] for name in ("role", "op", "phase", "site")})


def counted(calls: Records) -> Counter[tuple[str, int]]:
    """Calls by operation and payload, which is kept in the first steps."""
    payload = np.where(calls["step"] < DETAILED_STEPS, calls["payload"], -1)
    return Counter((OPS[kind], size) for kind, size in zip(calls["kind"].tolist(), payload.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_its_calls(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    log = LogFactory(tmp_path)
    for rank in range(RANKS):
        log.process(rank, world_size=RANKS).known({WORLD: [*range(RANKS)]})
    run = open_run(tmp_path)
    records = [training(draw) for _ in range(RANKS)]
    table = table_of(run, records, draw)
    own = measured.measured_steps(table, RANKS)
    chosen = np.flatnonzero(draw.random(STEPS) < 0.5)
    sums = measured.sums_in(table, chosen)
    for rank, of_rank in enumerate(records):
        assert measured.last_steps(table, RANKS)[rank] == of_rank["step"].max()
        steps = np.arange(-1, STEPS)
        by_step = of_rank[np.argsort(of_rank["step"], kind="stable")]
        begins = np.searchsorted(by_step["step"], np.arange(-1, STEPS + 1))
        for number, at in enumerate(own.of(rank, steps).tolist()):
            calls = by_step[begins[number] : begins[number + 1]]
            assert {(same.op, same.payload): same.calls for same in own.calls[at]} == counted(calls)
            assert sum(same.bytes for same in own.calls[at]) == calls["payload"].sum()
            assert bool(at) == bool(len(calls))
        in_chosen = of_rank[np.isin(of_rank["step"], chosen)]
        mine = sums[sums["process"] == rank]
        assert (mine["calls"].sum(), mine["payload_bytes"].sum()) == (len(in_chosen), in_chosen["payload"].sum())
    assert len(table) < sum(map(len, records))
    contents = [frozenset(same) for same in own.calls]
    assert len({*contents}) == len(contents)
