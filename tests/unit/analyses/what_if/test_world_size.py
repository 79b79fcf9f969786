"""`commtrace whatif --world-size`: more data-parallel ranks, beside steps computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from factory import ALL_GATHER, ALL_REDUCE, WORLD, LogFactory, record
from replayed_programs import GRADIENTS_SITE, US, Instruction, Operation, Program, run, write
from simulated_steps import PROGRAMS, Simulation

from commtrace.analyses.more_ranks import expected_maximum
from commtrace.analyses.what_if.changed_run import REMARKS, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.predictions import required_bandwidth, what_if
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.run import open_run
from commtrace.schema import Clock

MB: Final = 1_000_000


def program_of(
    folder: Path, calls: list[tuple[int, int, int, int]], late_us: int = 0, ranks: int = 2, steps: int = 8
) -> Path:
    """Write a run that computes 100 us (the last rank: more) before each call, of (kind, payload, us, site)."""
    program = Program(ranks, [], [[] for _ in range(ranks)])
    for step in range(steps):
        for kind, payload, transfer, site in calls:
            number = len(program.operations)
            times = dict.fromkeys(range(ranks), transfer * US)
            program.operations.append(
                Operation(kind, tuple(range(ranks)), 0, times, number, False, payload=payload, site=site)
            )  # fmt: skip
            for rank in range(ranks):
                late = late_us * US * (rank == ranks - 1)
                program.instructions[rank].append(Instruction("compute", 100 * US + late, -1, step=step))
                program.instructions[rank].append(Instruction("call", 0, number, step=step))
    write(program, run(program), folder)
    return folder


def test_the_expected_maximum_of_normal_values() -> None:
    # Tippett's table; two values: 1 / sqrt(pi).
    assert expected_maximum(1) == pytest.approx(0, abs=1e-6)
    assert expected_maximum(2) == pytest.approx(np.pi**-0.5, rel=1e-5)
    assert [expected_maximum(n) for n in (4, 10, 100, 1000)] == pytest.approx(
        [1.02938, 1.53875, 2.50759, 3.24144], rel=1e-4
    )


def test_bytes_grow_by_the_closed_form(tmp_path: Path) -> None:
    """An all_reduce of 2 ranks sends its payload, one of 8 ranks 7/4 of it."""
    replayed = replayed_run(open_run(program_of(tmp_path, [(ALL_REDUCE, MB, 400, GRADIENTS_SITE)])))
    table = what_if(changed_run(replayed, ["world-size=8"]))
    row = table.iloc[-1]
    assert table["step_ns"].iloc[0] == 500 * US
    assert row.step_ns == pytest.approx((100 + 400 * 7 / 4) * US)
    # All of it may be latency, which stays, or grows from 2 to 14 steps of a ring.
    assert (row.low_ns, row.high_ns) == pytest.approx((500 * US, (100 + 400 * 7) * US))
    assert "weak scaling" in table.attrs[REMARKS][0]
    assert what_if(changed_run(replayed, ["world-size=2"]))["step_ns"].iloc[-1] == 500 * US


def test_a_latency_stays(tmp_path: Path) -> None:
    # 100 us, and 100 us for each MB.
    calls = [(ALL_REDUCE, MB, 200, GRADIENTS_SITE), (ALL_REDUCE, 16 * MB, 1700, GRADIENTS_SITE)]
    row = what_if(changed_run(replayed_run(open_run(program_of(tmp_path, calls))), ["world-size=4"])).iloc[-1]
    assert row.step_ns == pytest.approx((200 + 200 + 1700 * 1.5) * US)


def test_a_network_predicts_both_numbers_of_ranks(tmp_path: Path) -> None:
    replayed = replayed_run(open_run(program_of(tmp_path, [(ALL_REDUCE, 4 * MB, 900, GRADIENTS_SITE)])))
    # A ring of 2 ranks: 2 steps of 100 us, 4 MB; of 4 ranks: 6 steps, 6 MB at 10 GB/s.
    network = "10GB/s+100us"
    row = what_if(changed_run(replayed, [f"network={network},{network}", "world-size=4"])).iloc[-1]
    assert row.step_ns == pytest.approx((100 + 900 * (400 + 800) / (200 + 400)) * US, rel=0.01)
    with pytest.raises(CommtraceError, match="put the network before world-size"):
        changed_run(replayed, ["world-size=4", f"network={network}"])


def test_shares_of_other_calls_stay(tmp_path: Path) -> None:
    """All_gathers that are not for parameters: each rank's 0.5 MB stay, so that a rank of 4 receives 3 of them."""
    replayed = replayed_run(open_run(program_of(tmp_path, [(ALL_GATHER, MB, 400, 2)])))
    changed = changed_run(replayed, ["world-size=4"])
    table = what_if(changed)
    assert table["step_ns"].iloc[-1] == pytest.approx((100 + 400 * 3) * US)
    assert any("all_gather" in remark and "the share of each rank stays" in remark for remark in table.attrs[REMARKS])


def test_the_bandwidth_of_more_ranks(tmp_path: Path) -> None:
    replayed = replayed_run(open_run(program_of(tmp_path, [(ALL_REDUCE, MB, 400, GRADIENTS_SITE)])))
    row = required_bandwidth(changed_run(replayed, ["world-size=4"])).iloc[0]
    assert row["wire_bytes"] == pytest.approx(1.5 * MB)
    assert row["bandwidth_gb_per_s"] == pytest.approx(1.5 * MB / 600e3)


def test_the_last_rank_is_later(tmp_path: Path) -> None:
    """One of two ranks computes 60 us longer: 30 more than their mean of 130."""
    log = program_of(tmp_path, [(ALL_REDUCE, MB, 400, GRADIENTS_SITE)], late_us=60)
    row = what_if(changed_run(replayed_run(open_run(log)), ["world-size=8", "free=data"])).iloc[-1]
    assert row.step_ns == pytest.approx((130 + 30 * expected_maximum(8) / expected_maximum(2)) * US, rel=1e-4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = program_of(tmp_path, [(ALL_REDUCE, MB, 400, GRADIENTS_SITE)])
    assert main(["whatif", str(log), "--world-size", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["change"] for row in document["tables"]["what_if"]] == ["as recorded", "world-size=16"]
    assert any("compared with real runs of up to 4 ranks" in sentence for sentence in document["sentences"])
    for value in ("1", "0", "many", "-4", "2000000"):
        assert main(["whatif", str(log), f"--world-size={value}"]) == 2
        assert f"{value!r} is not a number of ranks from 2 to 1,048,576" in capsys.readouterr().err


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    PROGRAMS["pipeline"](Simulation(3), 8).write(tmp_path / "messages")
    with pytest.raises(CommtraceError, match="it is not known how recv, send change with the number of ranks"):
        changed_run(replayed_run(open_run(tmp_path / "messages")), ["world-size=6"])
    for name, role, members in (("tensor", "tensor", [0, 1]), ("part", "data", [0, 1])):
        log = LogFactory(tmp_path / name)
        for rank in range(4 if name == "part" else 2):
            own = [rank // 2 * 2, rank // 2 * 2 + 1] if name == "part" else members
            files = log.process(rank, pid=100 + rank, world_size=4 if name == "part" else 2, boot_id="a")
            files.known({WORLD: [*range(4 if name == "part" else 2)], 2: own}, {WORLD: "data", 2: role})
            rows = []
            for step in range(8):
                begin = 1_000_000 * (step + 1)
                rows.append(
                    record(group=2, seq=step, step=step, payload=MB, clock=Clock.RETURN, t_wait=0, t_begin=begin,
                        t_return=begin + 400_000, t_end=begin + 400_000)
                )  # fmt: skip
            files.write(rows).end()
    replayed = replayed_run(open_run(tmp_path / "tensor"))
    with pytest.raises(CommtraceError, match=r"have calls of tensor, too.*commtrace dryrun --world-size"):
        changed_run(replayed, ["world-size=8"])
    with pytest.raises(CommtraceError, match="calls among 2 of 4 ranks"):
        changed_run(replayed_run(open_run(tmp_path / "part")), ["world-size=8"])
