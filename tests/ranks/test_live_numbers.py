"""Numbers of steps that a training gets while it runs, beside those of the report of its run."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from ranks import Nursery

from commtrace.run import Run, open_run

STEPS = 40
LIMIT_SECONDS = 60


def expected(run: Run) -> dict[int, dict[str, float]]:
    """Return the numbers of each step in the tables of the report."""
    times = run.table("step_times").set_index("step")
    volumes = run.table("purposes_by_step")
    columns = ["payload_bytes_per_rank", "calls_per_rank"]
    sums = volumes.groupby(["step", "purpose"], observed=True, as_index=False)[columns].sum()
    numbers: dict[int, dict[str, float]] = {}
    for step, row in times.iterrows():
        own = numbers[int(str(step))] = {
            "step_seconds": row["ns"] / 1e9,
            "exposed_share": row["exposed_ns"] / row["ns"],
        }
        own |= {f"{part}_seconds": row[f"{part}_ns"] / 1e9 for part in ("computation", "waiting", "exposed", "hidden")}
        own |= {"slowest_rank": row["slowest_rank"], "slowest_rank_delay_seconds": row["delay_ns"] / 1e9}
        for volume in sums.loc[sums["step"] == step].itertuples():
            own[f"payload_bytes/{volume.purpose}"] = float(str(volume.payload_bytes_per_rank))
            own[f"calls/{volume.purpose}"] = float(str(volume.calls_per_rank))
    return numbers


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended but was not awaited does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def train(nursery: Nursery, folder: Path, kind: str, **options: Any) -> tuple[list[int], list[str], Any]:
    statuses, outputs = nursery.run("live_numbers", folder / "log", folder / "numbers", kind, STEPS, **options)
    found = json.loads((folder / "numbers").read_text()) if (folder / "numbers").exists() else None
    return statuses, outputs, found


def test_a_loop_gets_the_numbers_of_the_report(nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs, found = train(nursery, tmp_path, "loop")
    assert statuses == [0, 0], outputs
    numbers = expected(open_run(tmp_path / "log"))
    assert [*numbers] == [*range(1, STEPS - 1)]  # the first step has no begin, the last one may not be over
    got = dict(found["steps"])
    assert [*got] == [*numbers]
    for step, values in got.items():
        assert values == pytest.approx(numbers[step]), step
    assert not is_alive(found["pid"])


@pytest.mark.long
def test_a_monitor_of_deepspeed_gets_them(nursery: Nursery, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    statuses, outputs, _ = train(nursery, tmp_path, "deepspeed")
    assert statuses == [0, 0], outputs
    numbers = expected(open_run(tmp_path / "log"))
    (file,) = (tmp_path / "csv").glob("*step_seconds*")
    with file.open() as lines:
        rows = [(int(float(samples)), float(value)) for samples, value in [*csv.reader(lines)][1:]]
    assert [samples for samples, _ in rows] == [4 * (step + 1) for step in numbers]
    assert [value for _, value in rows] == pytest.approx([own["step_seconds"] for own in numbers.values()])
    assert len([*(tmp_path / "csv").iterdir()]) > len(numbers[1])  # and the loss, the learning rate


def test_hugging_face_logs_them_beside_the_loss(nursery: Nursery, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    statuses, outputs, history = train(nursery, tmp_path, "trainer")
    assert statuses == [0, 0], outputs
    numbers = expected(open_run(tmp_path / "log"))
    found = {row["step"]: row["commtrace/step_seconds"] for row in history if "commtrace/step_seconds" in row}
    assert found == pytest.approx({step + 1: own["step_seconds"] for step, own in numbers.items()})
    assert {*found} < {row["step"] for row in history if "loss" in row}


def test_lightning_logs_them_beside_the_loss(nursery: Nursery, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    statuses, outputs, _ = train(nursery, tmp_path, "lightning")
    assert statuses == [0, 0], outputs
    numbers = expected(open_run(tmp_path / "log"))
    (file,) = tmp_path.glob("csv/*/metrics.csv")
    with file.open() as lines:
        rows = [*csv.DictReader(lines)]
    found = {int(row["step"]): float(row["commtrace/step_seconds"]) for row in rows if row["commtrace/step_seconds"]}
    assert found == pytest.approx({step: own["step_seconds"] for step, own in numbers.items()})
    assert {*found} < {int(row["step"]) for row in rows if row["loss"]}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unread", "killed"])
def test_the_process_that_reads_ends_with_the_training(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs, found = train(nursery, tmp_path, kind)
    assert (statuses == [0, 0]) == (kind == "unread"), outputs
    assert found["steps"]
    ends = time.monotonic() + LIMIT_SECONDS
    while is_alive(found["pid"]) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not is_alive(found["pid"])


def test_without_tracing_there_are_no_numbers(nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs, found = train(nursery, tmp_path, "loop", traced=False)
    assert statuses == [0, 0]
    assert not found["steps"]
    assert "commtrace: no numbers of steps: this process is not traced (COMMTRACE)" in outputs[0]
    assert "commtrace" not in outputs[1]
    assert not os.path.exists(tmp_path / "log")
