"""What differs from theory gets a name, or is shown as unexplained; sums stay exact whatever was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pytest
from factory import ALONE, PAIR, WORLD, LogFactory, record

from commtrace.analyses import reconciliation
from commtrace.analyses.causes import CAUSES, UNEXPLAINED
from commtrace.analyses.measured import DETAILED_STEPS
from commtrace.analyses.theory import Message, predict
from commtrace.reading.run import Run, open_run
from commtrace.schema import Phase, Records

RANKS: Final = 3
STEPS: Final = 3

OPS: Final = {
    name: 40 + number for number, name in enumerate(("all_reduce", "all_gather", "broadcast", "barrier", "reduce"))
}
PROGRAM, DEEPSPEED_LINE, CHECKPOINT = 11, 12, 13

ZERO_1: Final[dict[str, Any]] = {
    "source": "deepspeed",
    "engine": "DeepSpeedEngine",
    "zero_stage": 1,
    "zero": {
        "reduce_bucket_size": 60,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "use_multi_rank_bucket_allreduce": True,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "compute_grad_norm": True,
    },
    "data_parallel_size": RANKS,
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    "pipeline_stages": 1,
    "gradient_accumulation_steps": 1,
    "precision": "fp16",
    "communication_data_type": "float16",
    "gradient_clipping": 1.0,
    "check_grad_overflow": True,
    "optimizer": "DeepSpeedZeroOptimizer",
    "basic_optimizer": "AdamW",
    "moe": False,
    "optimizer_groups": [[0, 1], [2]],
    "parameters": [
        {"name": f"layer.{number}", "shape": shape, "dtype": "float16", "trainable": True}
        for number, shape in enumerate(([7, 5], [5], [11, 3]))
    ],
    "buffers": [],
}


def call(message: Message, step: int, **fields: int) -> Records:
    """A record of one call of a message."""
    phase = Phase.INIT if step < 0 else Phase.OPTIMIZER
    local = message.payload // RANKS if message.op == "all_gather" else 0
    known = {"site": DEEPSPEED_LINE, "phase": phase, "local": local}
    return record(kind=OPS[message.op], payload=message.payload, step=step, **{**known, **fields})


def calls(job: dict[str, Any], steps: Iterable[int]) -> list[Records]:
    """What theory expects, as records."""
    prediction = predict(job)
    return [call(one, step) for step in steps for one in prediction.step(step) for _ in range(one.calls)]


def run_of(
    directory: Path,
    rows: list[Records],
    job: dict[str, Any] | None = None,
    *,
    end: bool = True,
    ranks: int = RANKS,
    **stats: int,
) -> Run:
    """A log of which every rank has these records."""
    log = LogFactory(directory)
    for rank in range(ranks):
        one = log.process(rank, pid=4711 + rank, world_size=RANKS)
        one.known({WORLD: [*range(RANKS)], PAIR: [0, 1], ALONE: [rank]}, {WORLD: "data"})
        for op, number in OPS.items():
            one.add("kinds", id=number, op=op, variant=op, api="torch", dtype="float16", reduce_op=None)
        packages = "/opt/site-packages/deepspeed/runtime"
        one.add("sites", id=PROGRAM, file="/home/user/project/train.py", line=9, function="main")
        one.add("sites", id=DEEPSPEED_LINE, file=f"{packages}/zero/stage_1_and_2.py", line=5, function="step")
        one.add(
            "sites", id=CHECKPOINT, file=f"{packages}/engine.py", line=5, function="DeepSpeedEngine.save_checkpoint"
        )
        if job is not None:
            one.add("job", id=1, **job)
        one.write(rows)
        one.stats(**stats)
        if end:
            one.add("end", mono_ns=10_000_001_000, unix_ns=1, reason="exit")
    return open_run(directory)


def differing(run: Run, rank: int = 0) -> dict[str, tuple[int, int, int]]:
    """Calls missing, calls more, and bytes, by cause."""
    table = run.table("reconciliation")
    some = table.loc[(table["cause"] != "expected") & (table["rank"] == rank)]
    sums = some.groupby("cause")[["expected_calls", "measured_calls", "difference_bytes"]].sum()
    return {str(row.Index): (row[1], row[2], row[3]) for row in sums.itertuples()}


def every_step() -> list[Records]:
    return calls(ZERO_1, range(-1, STEPS))


def test_a_run_as_expected(tmp_path: Path) -> None:
    run = run_of(tmp_path, every_step(), ZERO_1)
    assert differing(run) == {}
    assert run.table("theory")["scheme"].tolist() == ["ZeRO-1"] * RANKS
    assert run.table("theory")["matched_share"].tolist() == [1.0] * RANKS
    cells = run.table("reconciliation")
    assert (cells["expected_bytes"] == cells["measured_bytes"]).all()
    assert set(cells["sites"]) == {"deepspeed/runtime/zero/stage_1_and_2.py:5 step"}


def cut(rows: list[Records]) -> list[Records]:
    """Without the last call of the last step."""
    return rows[:-1]


def without_optimizer(rows: list[Records]) -> list[Records]:
    """The last step's norms and parameters are not there."""
    kept = [one for one in predict(ZERO_1).step(0) if one.cause in ("gradients", "overflow check")]
    return [*(row for row in rows if row["step"][0] < STEPS - 1), *(call(one, STEPS - 1) for one in kept)]


def without_a_check(rows: list[Records]) -> list[Records]:
    """The last step's overflow check is not there."""
    return [row for row in rows if row["step"][0] < STEPS - 1 or row["payload"][0] != 1]


def with_call(op: str, payload: int, **fields: int) -> Callable[[list[Records]], list[Records]]:
    """One more in step 1."""
    return lambda rows: [*rows, call(Message(op, payload, ""), 1, **fields)]


def in_other_pieces(rows: list[Records]) -> list[Records]:
    """The last step's first two buckets, the second 2 bytes larger and the first 2 bytes smaller."""
    changed = [row.copy() for row in rows]
    large = [
        row for row in changed if row["step"][0] == 2 and row["kind"][0] == OPS["all_reduce"] and row["payload"][0] > 8
    ]
    large[0]["payload"] -= 2
    large[1]["payload"] += 2
    return changed


DIFFERENT: Final[dict[str, tuple[Callable[[list[Records]], list[Records]], dict[str, Any], tuple[int, int, int]]]] = {
    "the log begins after start-up": (lambda rows: [row for row in rows if row["step"][0] >= 0], {}, (3, 0, -146)),
    "the log ends within this step": (cut, {"end": False}, (1, 0, -72)),
    "optimizer skipped: gradients overflowed": (without_optimizer, {}, (4, 0, -164)),
    "saving or loading a checkpoint": (with_call("broadcast", 700, site=CHECKPOINT), {}, (0, 1, 700)),
    "a barrier of the program's own": (with_call("barrier", 0, site=PROGRAM), {}, (0, 1, 0)),
    "numbers of the program's own, as a loss that it averages": (
        with_call("all_reduce", 4, site=PROGRAM, phase=Phase.OTHER),
        {},
        (0, 1, 4),
    ),
    "calls of the program's own": (with_call("all_reduce", 4000, site=PROGRAM, phase=Phase.FORWARD), {}, (0, 1, 4000)),
    "the same bytes in other pieces: another order": (in_other_pieces, {}, (2, 2, 0)),
    "records that the log has lost": (without_a_check, {"dropped": 1}, (1, 0, -1)),
}


@pytest.mark.parametrize("cause", DIFFERENT)
def test_differences_have_names(cause: str, tmp_path: Path) -> None:
    change, options, numbers = DIFFERENT[cause]
    run = run_of(tmp_path, change(every_step()), ZERO_1, **options)
    for rank in range(RANKS):
        assert differing(run, rank) == {cause: numbers}
    told = run.table("theory")
    assert told["unexplained_bytes"].tolist() == [0] * RANKS
    assert_adds_up(run)


def test_every_cause_has_an_example() -> None:
    tested_with_trainings = {
        "whole gradients or optimizer states for the program",
        "GatheredParameters of the program",
        "gradients reduced several times: no_sync is not used",
    }
    assert {cause.sentence for cause in CAUSES} == {*DIFFERENT, *tested_with_trainings}


@pytest.mark.parametrize("change", [cut, with_call("all_gather", 999), with_call("all_reduce", 6, site=0)])
def test_what_has_no_name_is_unexplained(change: Callable[[list[Records]], list[Records]], tmp_path: Path) -> None:
    run = run_of(tmp_path, change(every_step()), ZERO_1)
    assert [*differing(run)] == [UNEXPLAINED]
    assert (run.table("theory")["unexplained_bytes"] > 0).all()
    assert_adds_up(run)


def assert_adds_up(run: Run) -> None:
    """From the formula to the log, to the byte; and the table of cells has every byte of the log."""
    bars = run.table("waterfall")
    if len(bars):
        assert bars["bytes"][:-1].sum() == bars["bytes"].iloc[-1]
        assert bars["kind"].iloc[0] == "closed form"
        assert bars["kind"].iloc[-1] == "measured"
    events, cells = run.events(), run.table("reconciliation")
    assert cells["measured_bytes"].sum() == events["payload_bytes"].sum()
    assert cells["measured_calls"].sum() == len(events)
    assert (cells["difference_bytes"] == cells["measured_bytes"] - cells["expected_bytes"]).all()


def test_the_waterfall_of_an_unexplained_call(tmp_path: Path) -> None:
    extra = call(Message("all_reduce", 600, ""), 2)
    bars = run_of(tmp_path, [*every_step(), extra], ZERO_1).table("waterfall")
    rows = {(row.label, row.kind): row.bytes for row in bars.itertuples()}
    assert rows["equation 2: 2 P (d-1)/d", "closed form"] == round(2 * 73 * 2 / 3 * 2)
    assert rows[UNEXPLAINED, "unexplained"] == pytest.approx(800, abs=1)
    assert rows["all_reduce in place of reduce_scatter", "cause"] == pytest.approx(73 * 2 / 3 * 2, abs=1)


def test_late_steps_are_compared_by_operation(tmp_path: Path) -> None:
    last = DETAILED_STEPS + 1
    rows = calls(ZERO_1, range(-1, last + 1))
    clean = run_of(tmp_path / "clean", rows, ZERO_1, ranks=1)
    assert differing(clean) == {}
    assert set(clean.table("reconciliation")["step"]) == {*range(-1, last + 1)}
    assert [*differing(run_of(tmp_path / "cut", rows[:-1], ZERO_1, ranks=1))] == [UNEXPLAINED]


def test_a_run_without_a_job(tmp_path: Path) -> None:
    run = run_of(tmp_path, every_step())
    assert set(run.table("theory")["not_predicted"]) == {"no job was captured"}
    assert not sum(len(run.table(name)) for name in ("expected", "reconciliation", "waterfall"))


@pytest.mark.parametrize("name", reconciliation.COLUMNS)
def test_columns(name: str, tmp_path: Path) -> None:
    full, empty = run_of(tmp_path / "a", every_step(), ZERO_1), run_of(tmp_path / "b", every_step())
    assert [*full.table(name).columns] == [*empty.table(name).columns] == [*reconciliation.COLUMNS[name]]
    assert full.table(name).dtypes.to_dict() == empty.table(name).dtypes.to_dict()


def test_other_versions_are_said(tmp_path: Path) -> None:
    log = LogFactory(tmp_path).process(0, world_size=1, versions={"torch": "2.6.0+cpu", "deepspeed": "0.19.8"})
    log.known().write([record()]).end()
    assert open_run(tmp_path).table("theory")["other_versions"].tolist() == ["torch 2.6.0+cpu (rules: 2.13.0)"]


def test_a_record_removed_from_the_file_shows(tmp_path: Path) -> None:
    """Through the whole reader: the file is rewritten without one record."""
    rows = every_step()
    run_of(tmp_path, rows, ZERO_1)
    segment = sorted(tmp_path.rglob("*.npy"))[0]
    np.save(segment, np.delete(np.load(segment), 7))
    table = open_run(tmp_path).table("reconciliation")
    assert set(table.loc[table["rank"] == 0, "cause"]) == {"expected", UNEXPLAINED}
    assert set(table.loc[table["rank"] == 1, "cause"]) == {"expected"}


# --- the report -----------------------------------------------------------------------------------------------------


def section(run: Run, width: int) -> list[str]:
    """Its lines in a report."""
    from rich.console import Console

    from commtrace.analyses.report.terminal import render

    console = Console(width=width, record=True, highlight=False, markup=False, emoji=False, file=open("/dev/null", "w"))
    for part in render(run, run.tables(), width):
        console.print(part)
    lines = console.export_text().splitlines()
    begin = lines.index("Measured against theory")
    end = next(number for number, line in enumerate(lines) if line.startswith("By line of code"))
    return lines[begin + 1 : end - 1]


@pytest.mark.parametrize("width", [80, 160])
def test_the_report_tells(width: int, tmp_path: Path) -> None:
    lines = section(run_of(tmp_path, [*every_step(), *with_call("all_reduce", 600)([])], ZERO_1), width)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("ZeRO-1: ")
    assert "- unexplained: 3 calls more of all_reduce, +1.76 KiB of payload, in 1 step, from deepspeed/" in text
    assert "equation 2: 2 P (d-1)/d 195 B 100.0 %" in text
    assert "measured, rank 0, step 2" in text


def test_the_report_says_why_nothing_is_compared(tmp_path: Path) -> None:
    assert section(run_of(tmp_path, every_step()), 80) == ["Not compared: no job was captured."]


def test_tables_are_frames(tmp_path: Path) -> None:
    assert all(isinstance(table, pd.DataFrame) for table in run_of(tmp_path, every_step(), ZERO_1).tables().values())
