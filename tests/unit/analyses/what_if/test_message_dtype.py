"""`commtrace whatif --dtype`: transfers of float32 gradients and parameters in half the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from factory import ALL_REDUCE
from replayed_programs import GRADIENTS_SITE, Instruction, Operation, Program, run, write

from commtrace.analyses.what_if.changed_run import REMARKS, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.predictions import required_bandwidth, what_if
from commtrace.errors import CommtraceError
from commtrace.run import open_run

US = 1_000
MB = 1_000_000


def program_of(folder: Path, calls: list[tuple[int, int, int]], steps: int = 8) -> Path:
    """Write a run of two ranks that compute 100 us before each call of a step, of (payload, us, site)."""
    program = Program(2, [], [[], []])
    for step in range(steps):
        for payload, transfer, site in calls:
            number = len(program.operations)
            times = dict.fromkeys((0, 1), transfer * US)
            program.operations.append(
                Operation(ALL_REDUCE, (0, 1), 0, times, number, False, payload=payload, site=site)
            )  # fmt: skip
            for rank in (0, 1):
                program.instructions[rank].append(Instruction("compute", 100 * US, -1, step=step))
                program.instructions[rank].append(Instruction("call", 0, number, step=step))
    write(program, run(program), folder)
    return folder


def test_gradients_take_half_of_what_their_bytes_do(tmp_path: Path) -> None:
    # A latency of 100 us and 100 us for each MB; the loss stays.
    calls = [(MB, 200, GRADIENTS_SITE), (16 * MB, 1700, GRADIENTS_SITE), (4, 50, 2)]
    recorded = replayed_run(open_run(program_of(tmp_path, calls)))
    changed = changed_run(recorded, ["dtype=bf16"])
    table = what_if(changed)
    row = table.iloc[-1]
    assert table["step_ns"].iloc[0] == pytest.approx((300 + 1950) * US)
    assert row.step_ns == pytest.approx((300 + 150 + 900 + 50) * US)
    # A latency of 0 to 200 us for each of the two.
    assert row.low_ns == pytest.approx((300 + 100 + 850 + 50) * US)
    assert row.high_ns == pytest.approx((300 + 200 + 950 + 50) * US)
    assert "2 calls of a rank in a step" in table.attrs[REMARKS][0]
    before, after = required_bandwidth(changed_run(recorded)), required_bandwidth(changed)
    assert after["wire_bytes"].iloc[0] == pytest.approx((before["wire_bytes"].iloc[0] - 4) / 2 + 4)


def test_messages_of_similar_sizes_show_no_latency(tmp_path: Path) -> None:
    calls = [(4 * MB, 500, GRADIENTS_SITE), (5 * MB, 600, GRADIENTS_SITE)]
    row = what_if(changed_run(replayed_run(open_run(program_of(tmp_path, calls))), ["dtype=bf16"])).iloc[-1]
    assert row.step_ns == row.low_ns == pytest.approx((200 + 250 + 300) * US)
    assert row.high_ns == pytest.approx((200 + 500 + 550) * US)


def test_a_network_says_what_half_the_bytes_take(tmp_path: Path) -> None:
    calls = [(4 * MB, 900, GRADIENTS_SITE)]
    recorded = replayed_run(open_run(program_of(tmp_path, calls)))
    # 4 MB take 400 us and a latency of twice 100 us, half of them 200 us less.
    network = "10GB/s+100us"
    row = what_if(changed_run(recorded, [f"network={network},{network}", "dtype=bf16"])).iloc[-1]
    assert row.step_ns == pytest.approx((100 + 900 * 400 / 600) * US, rel=0.01)


def test_the_catalogue_has_it_once(tmp_path: Path) -> None:
    recorded = replayed_run(open_run(program_of(tmp_path / "gradients", [(MB, 200, GRADIENTS_SITE)])))
    changes = what_if(changed_run(recorded), catalogue=True)["change"]
    assert "dtype=bf16" in [*changes]
    changed = changed_run(recorded, ["dtype=fp16"])
    assert "... dtype=bf16" not in [*what_if(changed, catalogue=True)["change"]]
    with pytest.raises(CommtraceError, match="the type of its messages has already been changed"):
        changed_run(recorded, ["dtype=fp16", "dtype=bf16"])
    others = replayed_run(open_run(program_of(tmp_path / "others", [(MB, 200, 2)])))
    assert "dtype=bf16" not in [*what_if(changed_run(others), catalogue=True)["change"]]


def test_equal_predictions_list_the_change_of_the_program_first(tmp_path: Path) -> None:
    recorded = replayed_run(open_run(program_of(tmp_path, [(MB, 200, GRADIENTS_SITE)])))
    table = what_if(changed_run(recorded), catalogue=True)
    changes = [*table["change"]]
    software, hardware = changes.index("dtype=bf16"), changes.index("scale-network=2x")
    assert table["step_ns"][software] == table["step_ns"][hardware]
    assert software < hardware


def test_nothing_to_change(tmp_path: Path) -> None:
    recorded = replayed_run(open_run(program_of(tmp_path, [(MB, 200, 2)])))
    with pytest.raises(CommtraceError, match="no calls for gradients or parameters in float32"):
        changed_run(recorded, ["dtype=bf16"])
    with pytest.raises(CommtraceError, match="'fp8' is no type of half the size of float32; choose from bf16, fp16"):
        changed_run(recorded, ["dtype=fp8"])
