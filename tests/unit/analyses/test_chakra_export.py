"""Execution traces in Chakra's format, read and played by rules of their own."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from chakra_traces import COLLECTIVE, COMP, RECV, SEND, Node, play, read
from factory import ALL_REDUCE, LogFactory, record, training
from replayed_programs import random_program, run, write
from simulated_steps import PROGRAMS, Simulation

from commtrace import cli
from commtrace.analyses.chakra_export import COLLECTIVES, export_chakra
from commtrace.errors import LogError, OutputError
from commtrace.operations import MESSAGES
from commtrace.run import Run, open_run
from commtrace.schema import Flag

STEPS = 6


def measured_us(recorded: Run) -> dict[int, float]:
    """Return when each measured step ends on the last rank, us after the first rank ended the step before."""
    paths = recorded.step_paths
    assert paths is not None
    ends = (paths.ends.max(axis=0)[1:] - paths.ends[:, 0].min()) / 1000
    return dict(zip(paths.steps.tolist(), ends.tolist(), strict=True))


def assert_played_as_recorded(folder: Path, recorded: Run, tolerance: float) -> None:
    """Assert that the longest path to the end of each step is as long as the recorded one; tolerance in us."""
    played = play(folder)
    for step, end in measured_us(recorded).items():
        assert played[step] == pytest.approx(end, abs=tolerance), step


def nodes_of(folder: Path, kind: int) -> list[Node]:
    return [node for own in read(folder).values() for node in own if node.type == kind]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_longest_path_is_the_recorded_step(tmp_path: Path, program: str) -> None:
    PROGRAMS[program](Simulation(3, delay=lambda rank, step, _: 3_000_000 * (rank == step % 3)), STEPS).write(
        tmp_path / "log"
    )
    recorded = open_run(tmp_path / "log")
    export_chakra(recorded, tmp_path / "traces")
    nodes = len([node for own in read(tmp_path / "traces").values() for node in own])
    assert_played_as_recorded(tmp_path / "traces", recorded, 0.5 * nodes)
    steps = measured_us(recorded)
    assert max(steps.values()) > 100 * nodes, "the tolerance, half a us for each node, is below 1 %"


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_path_of_random_programs(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    program = random_program(chance, chance.randint(2, 5), STEPS)
    write(program, run(program), tmp_path / "log")
    recorded = open_run(tmp_path / "log")
    export_chakra(recorded, tmp_path / "traces")
    played, steps = play(tmp_path / "traces"), measured_us(recorded)
    last = max(steps)
    assert played[last] == pytest.approx(steps[last], rel=0.03)


def test_every_call_of_the_steps_is_a_node(tmp_path: Path) -> None:
    PROGRAMS["pipeline"](Simulation(3), STEPS).write(tmp_path / "log")
    recorded = open_run(tmp_path / "log")
    written = export_chakra(recorded, tmp_path / "traces")
    events = recorded.events(steps=[*measured_us(recorded)])
    assert written == len(events)
    calls = Counter((row.rank, row.op, row.seq, row.payload_bytes) for row in events.itertuples())
    nodes = [node for kind in (COLLECTIVE, SEND, RECV) for node in nodes_of(tmp_path / "traces", kind)]
    assert Counter((node.rank, node.name, node["seq"], node["comm_size"]) for node in nodes) == calls
    assert json.loads((tmp_path / "traces" / "comm_groups.json").read_text()) == {"1": [0, 1, 2]}
    reduced = nodes_of(tmp_path / "traces", COLLECTIVE)[0]
    assert reduced.attributes == {
        "is_cpu_op": ("bool_val", 0), "step": ("int64_val", 1), "comm_type": ("int64_val", 0),
        "comm_size": ("int64_val", 1024), "pg_name": ("string_val", "1"), "seq": ("int64_val", 1),
    }  # fmt: skip
    sent = nodes_of(tmp_path / "traces", SEND)[0]
    assert {name: sent[name] for name in ("comm_src", "comm_dst", "comm_tag")} == {
        "comm_src": sent.rank, "comm_dst": sent.rank + 1, "comm_tag": 0,
    }  # fmt: skip
    assert all(node["is_cpu_op"] for node in nodes_of(tmp_path / "traces", COMP))


def test_ranks_and_steps_are_chosen_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROGRAMS["sharded"](Simulation(3), STEPS).write(tmp_path / "log")
    recorded = open_run(tmp_path / "log")
    options = ["--format", "chakra", "--out", str(tmp_path / "traces")]
    assert cli.main(["export", str(tmp_path / "log"), *options, "--steps", "2-3"]) == 0
    assert "60 calls" in capsys.readouterr().out
    ends = measured_us(recorded)
    paths = recorded.step_paths
    assert paths is not None
    skew = (paths.ends[:, 1].max() - paths.ends[:, 1].min()) / 1000
    played = play(tmp_path / "traces")
    assert set(played) == {2, 3}
    assert played[3] == pytest.approx(ends[3] - ends[1] + skew, abs=100)
    assert cli.main(["export", str(tmp_path / "log"), *options, "--force", "--ranks", "0,2"]) == 0
    assert {*read(tmp_path / "traces")} == {0, 2}


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    PROGRAMS["sharded"](Simulation(2), STEPS).write(tmp_path / "log")
    recorded = open_run(tmp_path / "log")
    for steps, message in (
        ([0, 1], r"steps 0-1 cannot be replayed; choose consecutive ones from 1-4"),
        ([-1], r"steps before the first one cannot be replayed"),
        ([1, 3], r"steps 1,3 cannot be replayed; choose consecutive ones from 1-4"),
    ):
        with pytest.raises(LogError, match=message):
            export_chakra(recorded, tmp_path / "traces", steps=steps)
    with pytest.raises(LogError, match="no call of these ranks and steps; the run has ranks 0-1"):
        export_chakra(recorded, tmp_path / "traces", ranks=[5])
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match="already exists"):
        export_chakra(recorded, tmp_path / "file")
    training(tmp_path / "short", steps=1)
    with pytest.raises(LogError, match="its steps cannot be replayed: this needs three training steps"):
        export_chakra(open_run(tmp_path / "short"), tmp_path / "traces")
    LogFactory(tmp_path / "dry").process(0, simulated=True).known().write([record(flags=Flag.SIMULATED)])
    with pytest.raises(LogError, match="a dry run has no times"):
        export_chakra(open_run(tmp_path / "dry"), tmp_path / "traces")
    assert not (tmp_path / "traces").exists()


def test_operations_without_the_calls_of_all_ranks_are_computation(tmp_path: Path) -> None:
    """A simulator would wait forever for the call of rank 1 that was not recorded."""
    simulation = PROGRAMS["sharded"](Simulation(2), STEPS)
    missing = next(row for row in simulation.rows[1] if row["step"] == 3 and row["kind"] == ALL_REDUCE)
    simulation.rows[1] = [row for row in simulation.rows[1] if row is not missing]
    simulation.write(tmp_path / "log")
    export_chakra(open_run(tmp_path / "log"), tmp_path / "traces")
    play(tmp_path / "traces")
    [alone] = [node for node in nodes_of(tmp_path / "traces", COMP) if node.name == "all_reduce"]
    assert (alone.rank, alone["step"]) == (0, 3)


def test_types_are_those_of_operations() -> None:
    assert {*COLLECTIVES} & {*MESSAGES} == set()
    assert sorted(COLLECTIVES.values()) == [*np.delete(np.arange(10), 8)]
