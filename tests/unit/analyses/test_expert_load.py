"""Load of experts, from the payloads of the calls that combine their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import factory
import pytest

import commtrace
from commtrace.schema import Phase, Purpose

TOKEN = 64
LAYERS = {10: "layers.0.moe", 11: "layers.1.moe"}
# Tokens by step, layer's site, and rank.
TOKENS = {0: {10: (6, 2), 11: (4, 4)}, 1: {10: (8, 0), 11: (3, 5)}}


def opened(folder: Path, token_bytes: int | None = TOKEN) -> Any:
    log = factory.LogFactory(folder)
    for rank in range(2):
        files = log.process(rank, pid=4711 + rank).known({1: [0, 1]}, {1: "expert"})
        known = {} if token_bytes is None else {"token_bytes": token_bytes}
        for site, module in LAYERS.items():
            purpose = {"name": Purpose.EXPERT_COMBINE.value, "module": module, **known}
            files.add("sites", id=site, file="/x.py", line=site, function="combine", purpose=purpose)
        calls = [(step, site, tokens[rank]) for step, sites in TOKENS.items() for site, tokens in sites.items()]
        rows = [
            factory.record(
                step=step, site=site, payload=TOKEN * tokens, seq=seq, phase=Phase.FORWARD,
                t_begin=1000 * seq + 100 * rank, t_return=1000 * seq + 500, t_end=1000 * seq + 500,
            )
            for seq, (step, site, tokens) in enumerate(calls, 1)
        ]  # fmt: skip
        rows.append(factory.record(step=1, site=1, payload=4096, seq=9, t_begin=9000, t_return=9001, t_end=9002))
        files.write(rows).end()
    return commtrace.open(folder)


def test_load_of_each_layer_and_rank(tmp_path: Path) -> None:
    table = opened(tmp_path).table("expert_load")
    rows = [tuple(row) for row in table.drop(columns="time_ns").itertuples(index=False)]
    assert rows == [
        ("layers.0.moe", 0, 7.0, 7.0 * TOKEN, 1.75, 2.0, 2),
        ("layers.0.moe", 1, 1.0, 1.0 * TOKEN, 0.25, 0.5, 0),
        ("layers.1.moe", 1, 4.5, 4.5 * TOKEN, 1.125, 1.25, 2),  # in step 0, both ranks have most
        ("layers.1.moe", 0, 3.5, 3.5 * TOKEN, 0.875, 1.0, 1),
    ]
    assert table["time_ns"].tolist() == [500, 400, 400, 500]


def test_imbalance_of_each_step(tmp_path: Path) -> None:
    rows = [tuple(row) for row in opened(tmp_path).table("expert_steps").itertuples(index=False)]
    assert rows == [
        (0, 10 / 8, 0, 1.5, "layers.0.moe", 0),
        (1, 11 / 8, 0, 2.0, "layers.0.moe", 0),
    ]


def test_tokens_are_missing_where_their_size_is_not_known(tmp_path: Path) -> None:
    table = opened(tmp_path, token_bytes=None).table("expert_load")
    assert table["tokens"].isna().all()
    assert table["bytes"].tolist() == [7.0 * TOKEN, TOKEN, 4.5 * TOKEN, 3.5 * TOKEN]


@pytest.mark.parametrize("name", ["expert_load", "expert_steps"])
def test_a_run_without_experts_has_no_rows(name: str, tmp_path: Path) -> None:
    factory.training(tmp_path)
    assert commtrace.open(tmp_path).table(name).empty
