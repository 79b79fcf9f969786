"""The commands and files of the page on watching a run are valid."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed")

import yaml

PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "watch.md"
TEXT = PAGE.read_text(encoding="utf-8")


def yaml_blocks() -> list[Any]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.S)]


def shell_commands() -> Iterator[list[str]]:
    """Yield the commands of indented blocks, without what follows them in a shell."""
    for line in re.findall(r"^    (commtrace .*)$", TEXT, re.M):
        yield shlex.split(re.split(r" [#&>]", line)[0])


def container_commands() -> Iterator[list[str]]:
    """Yield the commands of the sidecars."""
    for container in yaml_blocks()[0]["spec"]["template"]["spec"]["initContainers"]:
        yield container["command"]


def parse(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=" ".join(command[:2]))
    import_module(f"commtrace.commands.{command[1]}").prepare(parser)
    return parser.parse_args(command[2:])


def test_commands_have_these_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.txt").write_text("a-token-of-the-tests")
    commands = [command for command in (*shell_commands(), *container_commands()) if "--dashboard" not in command]
    assert {command[1] for command in commands} == {"top", "watch", "metrics"}
    # `$(ALERTS)` and `$ALERTS` are replaced before commtrace sees them.
    for command in commands:
        parse([re.sub(r"\$\(?ALERTS\)?", "http://alerts.example", argument) for argument in command])


def test_containers_share_the_log_and_the_memory() -> None:
    pod = yaml_blocks()[0]["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    (trained,) = pod["containers"]
    (log,) = (entry["value"] for entry in trained["env"] if entry["name"] == "COMMTRACE")
    for container in (trained, *pod["initContainers"]):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {log: "log", "/dev/shm": "shm"}
        assert {*mounts.values()} == volumes
    for container in pod["initContainers"]:
        assert container["restartPolicy"] == "Always"
        assert container["command"][2] == log


def test_alerts_ask_for_metrics_that_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from simulated_hangs import write_hang

    from commtrace.analyses.live.followed_run import FollowedRun
    from commtrace.analyses.live.metrics import metric_families

    write_hang(tmp_path / "log", "lock", 8, 3)
    families = metric_families(FollowedRun(tmp_path / "log").read())
    names = {sample.name for family in families for sample in family.samples}
    assert {*re.findall(r"`(commtrace_\w+)`", TEXT)} == names, "the table of the page has them all"
    rules = yaml_blocks()[2]["groups"][0]["rules"]
    assert {name for rule in rules for name in re.findall(r"commtrace_\w+", rule["expr"])} <= names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed")
def test_prometheus_takes_the_configuration_and_the_alerts(tmp_path: Path) -> None:
    for block, kind in zip(yaml_blocks()[1:], ("config", "rules"), strict=True):
        (tmp_path / kind).write_text(yaml.safe_dump(block))
        subprocess.run(["promtool", "check", kind, str(tmp_path / kind)], check=True, timeout=60)
