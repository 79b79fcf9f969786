"""Numbers for TensorBoard and Prometheus are those of the report."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from factory import WORLD, LogFactory
from ports import free_port
from simulated_steps import Simulation, sharded

from commtrace.cli import main
from commtrace.commands.exit_status import AS_EXPECTED, FAILED
from commtrace.run import open_run

RANKS = 3
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of steps with a known schedule."""
    sharded(Simulation(RANKS), 12).write(tmp_path / "log")
    return tmp_path / "log"


def test_tensorboard_has_the_values_of_each_step(log: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    threads = threading.active_count()
    assert main(["metrics", str(log), "--tensorboard", str(tmp_path / "events")]) == AS_EXPECTED
    assert threading.active_count() == threads, "the writer has ended"
    events = accumulator.EventAccumulator(str(tmp_path / "events"), size_guidance={"tensors": 0}).Reload()
    values = {
        tag.removeprefix("commtrace/"): {event.step: event.tensor_proto.float_val[0] for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
    }
    run = open_run(log)
    times = run.table("step_times").set_index("step")
    assert values["step_seconds"] == pytest.approx((times["ns"] / 1e9).to_dict())
    for part in ("computation", "waiting", "exposed", "hidden"):
        assert values[f"{part}_seconds"] == pytest.approx((times[f"{part}_ns"] / 1e9).to_dict())
    assert values["exposed_share"] == pytest.approx((times["exposed_ns"] / times["ns"]).to_dict())
    assert values["slowest_rank"] == times["slowest_rank"].to_dict()
    assert values["slowest_rank_delay_seconds"] == pytest.approx((times["delay_ns"] / 1e9).to_dict())
    events = run.events()
    for purpose, calls in events.loc[events["step"].isin(times.index)].groupby("purpose", observed=True):
        tag, by_step = str(purpose).replace(" ", "_"), calls.groupby("step")["payload_bytes"]
        assert values[f"calls/{tag}"] == pytest.approx((by_step.count() / RANKS).to_dict())
        assert values[f"payload_bytes/{tag}"] == pytest.approx((by_step.sum() / RANKS).to_dict())


def test_prometheus_reads_the_totals_of_the_report(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    assert main(["metrics", str(log), "--openmetrics", "-"]) == AS_EXPECTED
    families = {
        family.name: family.samples for family in parser.text_string_to_metric_families(capsys.readouterr().out)
    }
    volumes = open_run(log).table("volume_by_purpose")
    for name, column in (("calls", "calls"), ("payload_bytes", "payload_bytes"), ("wire_bytes", "wire_bytes")):
        found = {
            (sample.labels["purpose"], sample.labels["dimension"], sample.labels["operation"]): sample.value
            for sample in families[f"commtrace_{name}"]
        }
        rows = zip(volumes["purpose"], volumes["role"], volumes["op"], volumes[column], strict=True)
        assert found == {(*key,): value for *key, value in rows}
    (processes,) = families["commtrace_processes"]
    assert (processes.labels["state"], processes.value) == ("ended", RANKS)
    assert families["commtrace_step"][0].value == 11


def test_the_server_answers_until_the_run_is_over(tmp_path: Path) -> None:
    """It begins before the log does, and serves no numbers while the log cannot be read: old ones are not true."""
    pytest.importorskip("prometheus_client")
    directory, port, statuses = tmp_path / "log", free_port(), list[int]()
    arguments = ["--openmetrics", str(port), "--interval", "0.1", "--wait", "60", "--linger", "1", "--token", TOKEN]
    serving = threading.Thread(
        target=lambda: statuses.append(main(["metrics", str(directory), *arguments])), daemon=True
    )
    serving.start()
    wait_for(lambda: scraped(port) == "")
    process = LogFactory(directory).process(0, pid=100, world_size=1, boot_id="a").known({WORLD: [0]})
    wait_for(lambda: 'commtrace_processes{run="' in scraped(port))
    text = scraped(port)
    assert 'state="unknown"} 1.0' in text
    assert "commtrace_step{" not in text, "no step has begun"
    directory.rename(tmp_path / "gone")
    wait_for(lambda: scraped(port) == "")
    (tmp_path / "gone").rename(directory)
    process.end()
    wait_for(lambda: 'state="ended"} 1.0' in scraped(port))
    serving.join(60)
    assert statuses == [AS_EXPECTED]


def scraped(port: int) -> str:
    """Return what Prometheus reads; "-" if nothing listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.URLError:
        return "-"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_steps_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(log), "--json"]) == AS_EXPECTED
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    times = open_run(log).table("step_times")
    assert [(row["step"], row["step_seconds"]) for row in rows] == [*zip(times["step"], times["ns"] / 1e9, strict=True)]


def test_bad_arguments(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(log)]) == FAILED
    assert "give --tensorboard OUT, --openmetrics PORT, or --json" in capsys.readouterr().err
    assert main(["metrics", str(log), "--tensorboard", "x", "--until-eof"]) == FAILED
    assert "--until-eof: give --json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["metrics", str(log), "--openmetrics", "70000"])
    assert "'70000' is not a port from 1 to 65535" in capsys.readouterr().err
