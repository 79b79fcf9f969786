"""The dashboard asks for what the exporter has, and for all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_hangs import write_hang

pytest.importorskip("prometheus_client")

from commtrace.analyses.live.dashboard import dashboard
from commtrace.analyses.live.followed_run import FollowedRun
from commtrace.analyses.live.metrics import metric_families
from commtrace.cli import main
from commtrace.commands.exit_status import AS_EXPECTED

FUNCTIONS = {"max", "sum", "avg", "by", "rate", "deriv"}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each metric of the exporter, by the metric's name in PromQL; all have samples in this log."""
    log = tmp_path_factory.mktemp("dashboard") / "log"
    write_hang(log, "lock", 8, 3)
    families = [*metric_families(FollowedRun(log).read())]
    assert all(family.samples for family in families)
    return {sample.name: {*sample.labels} for family in families for sample in family.samples}


def targets() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each panel with each of its queries."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel, target


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of an expression, with the labels by which they are selected."""
    for name, matchers in re.findall(r"(commtrace_\w+)\{([^}]*)\}", expression):
        yield name, {*re.findall(r"(\w+)=", matchers)}


def grouping(expression: str) -> set[str]:
    return {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}


def test_metrics_and_labels_exist(labels: dict[str, set[str]]) -> None:
    for panel, target in targets():
        expression = target["expr"]
        found = dict(selectors(expression))
        words = {*re.findall(r"[a-z_]+(?=[ ({])", re.sub(r"\{[^}]*\}|by \([^)]*\)", "{", expression))}
        assert words - FUNCTIONS == {*found}, "nothing else is in the expression"
        for name, selected in found.items():
            assert selected | grouping(expression) <= labels[name], expression
        shown = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        assert shown <= (grouping(expression) or labels[next(iter(found))]), panel["title"]


def test_every_metric_is_on_the_dashboard(labels: dict[str, set[str]]) -> None:
    """Also every label, so that none is exported that nobody can see."""
    asked = {name for _, target in targets() for name, _ in selectors(target["expr"])}
    assert asked == {*labels}
    text = json.dumps(dashboard())
    for label in set[str]().union(*labels.values()):
        assert re.search(rf"\b{label}\b", text), label


def test_parts_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The values of labels that the dashboard names exist."""
    write_hang(tmp_path / "log", "lock", 8, 3)
    assert main(["metrics", str(tmp_path / "log"), "--openmetrics", "-"]) == AS_EXPECTED
    exported = {*re.findall(r'part="(\w+)"', capsys.readouterr().out)}
    named = {
        part for _, target in targets() for group in re.findall(r'part=~?"([^"]*)"', target["expr"])
        for part in group.split("|")
    }  # fmt: skip
    assert named == exported


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_the_command_needs_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["metrics", "--dashboard"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out) == dashboard()


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed")


@needs_promtool
def test_prometheus_parses_each_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, (_, target) in enumerate(targets())
    ]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", str(file)], check=True, timeout=60)


@needs_promtool
def test_prometheus_has_no_remark_on_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hang(tmp_path / "log", "lock", 8, 3)
    assert main(["metrics", str(tmp_path / "log"), "--openmetrics", "-"]) == AS_EXPECTED
    text = capsys.readouterr().out
    # promtool reads the text format of Prometheus: the name of a counter has its suffix, and nothing ends it.
    counters = r"(commtrace_(?:calls|payload_bytes|wire_bytes)) "
    text = re.sub(rf"^# (HELP|TYPE) {counters}", r"# \1 \2_total ", text, flags=re.M)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text.removesuffix("# EOF\n"), text=True, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
