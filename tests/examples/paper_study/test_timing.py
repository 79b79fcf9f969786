"""The study's time part: tables and claims from synthetic logs with known times, and one real run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factory import RECV, SEND, WORLD, LogFactory, ProcessFactory, record

from commtrace.analyses.scaling.step_times import step_times, timed_calls
from commtrace.errors import CommtraceError, LogError
from commtrace.run import open_run
from commtrace.schema import Clock, Flag
from examples.paper_study.__main__ import main
from examples.paper_study.claims import CONFIRMED, CONTRADICTED, INCONCLUSIVE, REFINED, Claim
from examples.paper_study.parts import Options
from examples.paper_study.timing import machine_load, time_claims, time_part
from examples.paper_study.timing.bare_messages import FIRST as FIRST_TAG
from examples.paper_study.timing.bare_messages import TOUCHED, UNTOUCHED
from examples.paper_study.timing.receives import (
    TIMES,
    by_kind,
    first_message_costs,
    forwards,
    receives,
    transfers_by_size,
)
from examples.paper_study.timing.time_tables import (
    complete_run,
    message_times,
    result_of,
    step_shares,
    tables_of,
    throughput,
)
from examples.paper_study.timing.trainings import (
    DDP,
    HIDDEN,
    PIPELINE,
    SCHEMES,
    ZERO,
    Messages,
    Point,
    messages,
    points,
    schemes,
)

US = 1_000
SMALL, LARGE = 1 << 20, 8 << 20
STEPS = 5
MODEL = {"train_micro_batch_size_per_gpu": 1, "seq_length": 128, "gradient_accumulation_steps": 1}


def point(scheme: Any = DDP, *, seq_length: int = 128, repeat: int = 1, hidden: int = HIDDEN) -> Point:
    return Point(scheme, hidden, seq_length, 2, repeat)


def process(log: LogFactory, rank: int, **facts: Any) -> ProcessFactory:
    facts = {"recorder": "native", "boot_id": "a", "cores": "0-1", **facts}
    return log.process(rank, pid=100 + rank, world_size=2, **facts).known({WORLD: [0, 1]})


def data_parallel(
    folder: Path, *, period: int = 2_000, ranks: Sequence[int] = (0, 1), steps: int = STEPS, **facts: Any
) -> Path:
    """Write a log whose steps have an asynchronous and a blocking all_reduce, and return its directory.

    In us after the start of a step, the asynchronous one lasts from 100 (rank 1: 150) to 400, the blocking one from
    600 (700) to 800, or 1100 in the first step. Computation follows; a period is from the end of a step to the next.
    """
    log = LogFactory(folder / "log")
    for rank in ranks:
        writer = process(log, rank, **facts)
        writer.add("job", id=1, source="ddp", data_parallel_size=2, model=MODEL)
        rows = []
        for step in range(steps):
            begin = 1_000 + step * period + (300 if step else 0)
            offsets = (100, 600, 800) if rank == 0 else (150, 700, 800)
            overlapped, blocking, end = (begin + offset for offset in offsets)
            end += 300 if step == 0 else 0
            overlapped, blocking, end, overlapped_end = overlapped * US, blocking * US, end * US, (begin + 400) * US
            rows.append(
                record(t_begin=overlapped, t_return=overlapped + 2 * US, t_wait=overlapped_end + US,
                       t_end=overlapped_end, payload=SMALL, step=step, seq=2 * step, clock=Clock.FUTURE,
                       flags=Flag.ASYNC)
            )  # fmt: skip
            times = {"t_begin": blocking, "t_return": end, "t_wait": 0, "t_end": end}
            rows.append(record(**times, payload=LARGE, step=step, seq=2 * step + 1, clock=Clock.RETURN))
        writer.write(rows).end()
    load = {"cores": 2, "wall_seconds": 10.0, "cpu_seconds": 5.0, "others_cores": 0.5}
    (folder / machine_load.FILE).write_text(json.dumps(load))
    return folder


SITES = {
    "PipelineEngine.__init__": 11,
    "PipelineEngine._send_tensor_meta": 12,
    "PipelineEngine._recv_tensor_meta": 13,
    "PipelineEngine._exec_send_activations": 14,
    "PipelineEngine._exec_recv_activations": 15,
    "PipelineEngine._exec_send_grads": 16,
    "PipelineEngine._exec_recv_grads": 17,
}
"""Functions of deepspeed/runtime/pipe/engine.py."""
HALF = 262_144


def messages_of(step: int, at: int) -> Iterator[tuple[int, str, str, int, int, int, int, int, int]]:
    """Yield (rank, op, function, step, micro-batch, payload, begin, end, number) of a step of 2 micro-batches, in us.

    The first stage computes for 400 us (900 us in the first step), sends micro-batch 0, computes for 200 us and waits
    for its gradients; the last stage computes for 300 us between a receive and the send that follows.
    """
    begin = at + (900 if step == 0 else 400)
    n = 1 + 2 * 2 * step + (1 if step else 0)
    if step == 0:
        yield 0, "send", "_send_tensor_meta", 0, 0, 1024, begin, begin + 20, 1
        yield 1, "recv", "_recv_tensor_meta", 0, 0, 1024, at, begin + 20, 1
        begin, n = begin + 20, 2
    first, later = (50, 40) if step == 0 else (25, 20)
    ready = at if step else begin + 5
    yield 0, "send", "_exec_send_activations", step, 0, HALF, begin, begin + first, n
    yield 1, "recv", "_exec_recv_activations", step, 0, HALF, ready, begin + first, n
    begin += first
    yield 0, "send", "_exec_send_activations", step, 0, 64, begin, begin + 10, n + 1
    yield 1, "recv", "_exec_recv_activations", step, 0, 64, begin + 2, begin + 10, n + 1
    begin += 10
    yield 0, "recv", "_exec_recv_grads", step, 0, HALF, begin + 200, begin + 300 + later, 2 * step
    yield 1, "send", "_exec_send_grads", step, 0, HALF, begin + 300, begin + 300 + later, 2 * step
    begin += 300 + later
    yield 0, "send", "_exec_send_activations", step, 1, HALF, begin, begin + later, n + 2
    yield 1, "recv", "_exec_recv_activations", step, 1, HALF, begin + 5, begin + later, n + 2
    begin += later
    yield 0, "send", "_exec_send_activations", step, 1, 64, begin, begin + 10, n + 3
    yield 1, "recv", "_exec_recv_activations", step, 1, 64, begin + 2, begin + 10, n + 3
    begin += 10
    yield 0, "recv", "_exec_recv_grads", step, 1, HALF, begin + 100, begin + 300 + later, 2 * step + 1
    yield 1, "send", "_exec_send_grads", step, 1, HALF, begin + 300, begin + 300 + later, 2 * step + 1


PERIOD = 3_000


def pipeline(folder: Path, *, steps: int = STEPS) -> Path:
    """Log two stages: a handshake, with a sender that is 40 us late and a transfer of 50 us, and the steps."""
    calls = [
        (0, "send", "__init__", -1, -1, 4, 100, 150, 0),
        (1, "recv", "__init__", -1, -1, 4, 60, 150, 0),
        *(message for step in range(steps) for message in messages_of(step, 200 + step * PERIOD)),
    ]
    log = LogFactory(folder / "log")
    for rank in (0, 1):
        writer = process(log, rank)
        for name, number in SITES.items():
            file = "/opt/lib/site-packages/deepspeed/runtime/pipe/engine.py"
            writer.add("sites", id=number, file=file, line=number, function=name)
        writer.add("job", id=1, source="deepspeed", data_parallel_size=1, pipeline_stages=2,
                model={**MODEL, "gradient_accumulation_steps": 2})  # fmt: skip
        writer.write(
            record(kind=SEND if op == "send" else RECV, site=SITES[f"PipelineEngine.{function}"], step=step,
                   micro_batch=micro_batch, payload=payload, t_begin=begin * US, t_return=begin * US + 500,
                   t_wait=begin * US + 500, t_end=end * US, peer=1 - rank, tag=0, seq=seq, clock=Clock.WAIT)
            for caller, op, function, step, micro_batch, payload, begin, end, seq in calls
            if caller == rank
        ).end()  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("time")
    runs = [
        result_of(point(repeat=repeat), data_parallel(folder / f"ddp{repeat}", period=period))
        for repeat, period in ((1, 2_400), (2, 2_000), (3, 2_200))
    ]
    return [*runs, result_of(point(PIPELINE), pipeline(folder / "pipeline"))]


def test_parts_of_a_step_are_those_of_the_log(results: list[Any]) -> None:
    steps: Any = tables_of(results)["time_steps"].query("scheme == 'DDP' and repeat == 2")
    assert sorted(steps["step"].unique()) == [1, 2, 3]
    for rank, computing, overlapped, communicating, waiting in ((0, 1_500, 298, 102, 100), (1, 1_650, 248, 102, 0)):
        rank_steps = steps.loc[steps["rank"] == rank]
        assert len(rank_steps) == 3
        assert rank_steps["step_ns"].eq(2_000 * US).all()
        assert rank_steps["computing_ns"].eq(computing * US).all()
        assert rank_steps["overlapped_ns"].eq(overlapped * US).all()
        assert rank_steps["communicating_ns"].eq(communicating * US).all()
        assert rank_steps["waiting_ns"].eq(waiting * US).all()


def test_a_point_is_its_median_run_and_the_spread(results: list[Any]) -> None:
    tables = tables_of(results)
    row = tables["time_points"].query("scheme == 'DDP'").iloc[0]
    assert (row["repeats"], row["steps"]) == (3, 9)
    assert (row["step_ns_least"], row["step_ns"], row["step_ns_most"]) == (2_000 * US, 2_200 * US, 2_400 * US)
    assert row["tokens_per_s"] == pytest.approx(256 / 2_200e-6)
    assert row["tokens_per_s_most"] == pytest.approx(256 / 2_000e-6)
    assert row["computing_ns"] == (1_500 + 1_650) / 2 * US + 200 * US
    assert row["waiting_ns"] == 50 * US
    assert row["in_calls_share"] == pytest.approx((102 + 50) / 2_200)
    shares = step_shares(tables["time_points"]).query("scheme == 'DDP'").iloc[0]
    assert shares["waiting_share"] == pytest.approx(50 / 2_200)
    # 72 L h^2 (1 + s / 6h + V / 12Lh) flops per token, half of them on each rank.
    flops = 72 * 4 * 256**2 * (1 + 128 / (6 * 256) + 256 / (12 * 4 * 256))
    assert row["gflop_per_s"] == pytest.approx(128 * flops / 2_200e-6 / 1e9)


def test_bandwidths_are_of_whole_transfers(results: list[Any]) -> None:
    """Transfers of asynchronous calls count as well, although they end after the calls return."""
    sent = step_times(results[0].run).messages.set_index("bytes")["transfer_ns"]  # 2 ranks: wire bytes are the payload
    assert sent.loc[SMALL].eq(250 * US).all()
    assert sent.loc[LARGE].eq(100 * US).all()
    table: Any = tables_of(results)["time_bandwidths"].set_index(["scheme", "op"])
    ddp = table.loc[("DDP", "all_reduce")]
    assert (ddp["message_bytes"], ddp["calls"]) == (LARGE, 3 * 3 * 2)
    assert ddp["busbw_gb_per_s"] == pytest.approx(LARGE / (100 * US))
    received = table.loc[("pipeline", "recv")]
    assert received["message_bytes"] == HALF
    # A step receives hidden states in 25 and 15 us (the receiver is 5 us late), and gradients in 20 us each.
    assert received["busbw_gb_per_s"] == pytest.approx(4 * HALF / (80 * US))


def test_time_in_calls_is_that_of_the_report(results: list[Any]) -> None:
    table = tables_of(results)["time_operations"].query("scheme == 'DDP'").iloc[0]
    assert (table["op"], table["standing_ns"]) == ("all_reduce", (202 + 102) / 2 * US)
    reported = results[2].run.table("steps_by_operation").query("step == 2").iloc[0]
    assert table["standing_ns"] == reported["in_call_ns_per_rank"] + reported["waiting_ns_per_rank"]


def test_the_first_step_is_held_against_later_ones(results: list[Any]) -> None:
    tables = tables_of(results)
    row = tables["time_first_steps"].query("scheme == 'DDP'").iloc[0]
    assert (row["first_calls"], row["later_calls"]) == (2, 2)
    assert (row["first_standing_ns"], row["later_standing_ns"]) == (452 * US, 152 * US)
    assert (row["first_late_ns"], row["later_late_ns"]) == (50 * US, 50 * US)
    assert (row["first_transfer_ns"], row["later_transfer_ns"]) == (650 * US, 350 * US)
    (claim,) = time_claims.cold_operations(tables["time_first_steps"], "")
    assert claim.verdict == CONTRADICTED
    assert not any(measure.values for measure in claim.measures[:4])
    colder = tables["time_first_steps"].assign(first_transfer_ns=lambda table: table["first_transfer_ns"] * 10)
    (claim,) = time_claims.cold_operations(colder, "")
    assert [measure.values["all_reduce of DDP"] for measure in claim.measures[2:4]] == [6_500 * US, 350 * US]
    waits = tables["time_first_steps"].query("op == 'recv'").assign(first_late_ns=9e6)
    assert [verdict(time_claims.cold_operations(waits, reason)) for reason in ("", "busy")] == [REFINED, INCONCLUSIVE]


def verdict(claims: Iterator[Claim]) -> str:
    """Return the verdict of the only claim."""
    (claim,) = claims
    return claim.verdict


def test_receives_are_split_into_waiting_and_transfer(results: list[Any]) -> None:
    table: Any = receives(results[3].calls).set_index(["what", "step", "micro_batch"]).sort_index()

    def times(*key: object) -> list[float]:
        row = table.loc[[key]].iloc[0]
        return [row[name] / US for name in TIMES]

    assert times("handshake", -1, -1) == [90, 40, 40, 0, 50]
    assert times("metadata", 0, 0) == [920, 900, 900, 0, 20]
    assert times("hidden states", 0, 0) == [45, 0, 0, 0, 45]
    assert times("hidden states", 0, 1) == [35, 0, 0, 0, 35]
    assert times("hidden states", 1, 0) == [425, 400, 400, 0, 25]
    assert times("mask", 1, 0) == [8, 0, 0, 0, 8]
    assert times("gradients", 0, 0) == [140, 100, 100, 0, 40]
    assert times("gradients", 1, 1) == [220, 200, 200, 0, 20]
    assert table.loc[("hidden states", 0, 0), "when"] == "first"
    assert table.loc[("gradients", 0, 1), "when"] == "first step"
    assert table.loc[("hidden states", 2, 0), "when"] == "later first"
    assert table.loc[("hidden states", 2, 1), "when"] == "later"
    assert len(table) == 2 + 6 * STEPS
    stages = forwards(results[3].calls).set_index("step")
    assert stages.loc[0, "before_first_ns"] == (50 + 900) * US
    assert stages["second_forward_ns"].eq(200 * US).all()


def test_what_a_sender_does_meanwhile_is_told_apart(tmp_path: Path) -> None:
    """The receiver waits from 0 to 100 us; the sender is in another call from 20 to 50 us."""
    log = LogFactory(tmp_path / "log")
    for rank in (0, 1):
        writer = process(log, rank)
        rows = [
            record(kind=RECV if rank else SEND, step=0, t_begin=(2_100 - 100 * rank) * US, t_return=2_120 * US,
                   t_wait=2_120 * US, t_end=2_130 * US, peer=1 - rank, tag=0, seq=0)
        ]  # fmt: skip
        if rank == 0:
            rows.append(record(t_begin=2_020 * US, t_return=2_040 * US, t_wait=2_040 * US, t_end=2_050 * US, seq=9))
        writer.write(rows).end()
    row = receives(timed_calls(open_run(tmp_path / "log"), columns=("site",))).iloc[0]
    assert [row[name] / US for name in ("late_ns", "sender_computing_ns", "sender_in_calls_ns")] == [100, 70, 30]
    assert row["what"] == "other"


def test_senders_on_another_clock_are_not_known(tmp_path: Path) -> None:
    log = LogFactory(tmp_path / "log")
    for rank in (0, 1):
        process(log, rank, boot_id=f"boot {rank}").write(
            [record(kind=RECV if rank else SEND, peer=1 - rank, tag=0, seq=0)]
        ).end()
    row = receives(timed_calls(open_run(tmp_path / "log"), columns=("site",))).iloc[0]
    assert row[["late_ns", "transfer_ns", "sender_computing_ns"]].isna().all()
    assert row["receive_ns"] == 8_000


def test_costs_of_first_messages_and_the_cold_receive(results: list[Any], tmp_path: Path) -> None:
    table = receives(results[3].calls)
    kinds = by_kind(table)
    alone = {lazy: open_run(bare(tmp_path / str(lazy), 300 if lazy else 60)) for lazy in (False, True)}
    times = message_times([(Messages(lazy, 1), run) for lazy, run in alone.items()])
    sizes = transfers_by_size(table, times)
    at: Any = sizes.set_index(["which", "payload_bytes"])["transfer_ns"]
    assert at.loc[("pipeline, first", 1024)] == 20 * US
    assert at.loc[("pipeline, first", HALF)] == 45 * US
    assert at.loc[("pipeline, later", HALF)] == 20 * US  # 25 and 15 us, equally often
    assert at.loc[("alone, first, connections made at once", 1024)] == 60 * US
    assert at.loc[("alone, first, connections made when used", 1024)] == 300 * US
    assert at.loc[("alone, later", 1024)] == 30 * US
    assert at.loc[("alone, later, into untouched memory", 1024)] == 45 * US
    costs = first_message_costs(sizes).set_index("cause")["smallest_ns"]
    assert costs["later message"] == 30 * US
    assert costs["+ new connection"] == 30 * US
    assert costs["+ connection made by its first message"] == 270 * US
    assert costs["+ memory never touched before"] == 15 * US
    (claim,) = time_claims.cold_small_messages(kinds)
    took, waiting, computing = (measure.values for measure in claim.measures)
    assert claim.verdict == REFINED
    assert took == {"handshake": 90 * US, "metadata, first step": 920 * US, "hidden states that follow": 45 * US,
                    "first hidden states of later steps": 425 * US}  # fmt: skip
    assert waiting["metadata, first step"] == pytest.approx(900 / 920)
    assert waiting["first hidden states of later steps"] == pytest.approx(400 / 425)
    assert computing == {"metadata, first step": 1}
    slow = {"late_ns": 0.0, "transfer_ns": 920e3, "transfer_ns_median": 920e3}
    metadata = kinds["what"] == "metadata"
    kinds = kinds.assign(**{name: kinds[name].mask(metadata, value) for name, value in slow.items()})
    assert verdict(time_claims.cold_small_messages(kinds)) == CONFIRMED


def bare(folder: Path, first: int) -> Path:
    """Log messages with an early receiver: one takes `first` us, a later one 30, one into untouched memory 45."""
    log = LogFactory(folder)
    for rank in (0, 1):
        rows = []
        for number, (tag, took) in enumerate(((FIRST_TAG, first), (TOUCHED, 30), (UNTOUCHED, 45))):
            begin = 1_000 * (number + 1)
            end = (begin + took) * US
            begin = (begin - 100 * rank) * US
            rows.append(
                record(kind=RECV if rank else SEND, payload=1024, step=-1, t_begin=begin, t_return=begin + 1, tag=tag,
                       t_wait=begin + 1, t_end=end, peer=1 - rank, seq=0)
            )  # fmt: skip
        process(log, rank).write(rows).end()
    return folder


def test_warnings_name_what_limits_the_numbers(results: list[Any], tmp_path: Path) -> None:
    (busy,) = time_part.warnings_of(tables_of(results)["time_runs"])
    assert "used 0.5 cores" in busy
    crowded = result_of(point(), data_parallel(tmp_path, cores="0", recorder="python"))
    warnings = time_part.warnings_of(tables_of([crowded])["time_runs"])
    assert len(warnings) == 3
    assert warnings[0].startswith("2 ranks on 1 core")


Spread = tuple[float, float, float]


def swept(speeds: dict[tuple[str, int, int], Spread]) -> pd.DataFrame:
    """Return `time_points` for (scheme, width, length) -> (least, median, greatest) of both GFLOP/s and tokens/s."""
    rows = []
    for (scheme, hidden, length), spread in speeds.items():
        row: dict[str, Any] = {
            "scheme": scheme,
            "hidden": hidden,
            "seq_length": length,
            "in_calls_share": hidden / 1024,
        }
        for name in ("gflop_per_s", "tokens_per_s"):
            row |= dict(zip((f"{name}_least", name, f"{name}_most"), spread, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        ((9, 10, 11), (21, 22, 23), CONFIRMED),
        ((9, 10, 11), (12, 15, 16), REFINED),
        ((9, 10, 11), (10, 15, 16), CONTRADICTED),
    ],
)
def test_longer_sequences_are_judged_by_the_spread(short: Spread, long: Spread, expected: str) -> None:
    points = swept({("DDP", 256, 128): short, ("DDP", 256, 1024): long})
    key = "data-parallel-throughput"
    (claim,) = time_claims.throughput_over_lengths(key, points, "")
    assert (claim.verdict, claim.measures[0].values) == (expected, {"DDP": long[1] / 10})
    (claim,) = time_claims.throughput_over_lengths(key, points, "busy")
    assert (claim.verdict, claim.reason) == (INCONCLUSIVE, "busy")
    assert not [*time_claims.throughput_over_lengths(key, points.iloc[:1], "")]
    (row,) = throughput(points).to_dict("records")
    assert (row["short"], row["long"], row["gflop_per_s_factor"]) == (128, 1024, f"{long[1] / 10:.2f}")


def test_tensor_parallelism_is_compared_with_a_pipeline() -> None:
    points = swept(
        {("tensor", 256, 128): (9, 10, 11), ("tensor", 256, 256): (19, 20, 21),
         ("pipeline", 256, 128): (4, 5, 6), ("pipeline", 256, 256): (15, 16, 18)}
    )  # fmt: skip
    (claim,) = time_claims.tensor_against_pipeline(points, "tensor", "pipeline", "")
    ratios, lengths = (measure.values for measure in claim.measures)
    assert (claim.verdict, ratios) == (CONFIRMED, {"least": 1.25, "most": 2.0})
    assert lengths == {"all": 2, "faster in every run": 2, "slower in every run": 0}
    alone = points.query("scheme == 'tensor'")
    assert not [*time_claims.tensor_against_pipeline(alone, "tensor", "pipeline", "")]


def test_shares_of_two_widths_are_compared() -> None:
    points = swept({("DDP", 256, 256): (1, 1, 1), ("DDP", 512, 256): (1, 1, 1)})
    (claim,) = time_claims.scale(points, "")
    assert (claim.verdict, [measure.values for measure in claim.measures]) == (CONFIRMED, [{"DDP": 0.25}, {"DDP": 0.5}])
    assert not [*time_claims.scale(points.iloc[:1], "")]


@pytest.mark.long
def test_schemes_differ_only_beyond_the_spread(tmp_path: Path) -> None:
    periods = {"DDP": (2_000, 2_200), "ZeRO-1": (2_100, 2_400), "ZeRO-2": (4_000, 4_400)}
    names = {scheme.name: scheme for scheme in SCHEMES}
    measured = [
        result_of(point(names[name], repeat=repeat), data_parallel(tmp_path / f"{name}{repeat}", period=period))
        for name, both in periods.items()
        for repeat, period in enumerate(both, 1)
    ]
    tables = tables_of(measured)
    assert time_claims.count_differences(tables["time_points"], "DDP") == (1, 0, 2)
    (claim,) = time_claims.zero_throughput(tables["time_points"], "DDP", "")
    assert (claim.verdict, claim.measures[0].values["slower in every run"]) == (INCONCLUSIVE, 1)
    assert (
        verdict(time_claims.zero_throughput(tables["time_points"].query("scheme != 'ZeRO-1'"), "DDP", "")) == CONFIRMED
    )
    quiet = tables["time_runs"].assign(others_cores=0.0)
    assert time_claims.why_not_comparable(quiet) == ""
    for runs in (tables["time_runs"], quiet.query("repeat == 1"), quiet.assign(others_cores=None)):
        assert time_claims.why_not_comparable(runs)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("rank", "rank 1 left no log"),
        ("steps", "no training step completed on every rank"),
        ("end", "rank 1 did not end"),
        ("cut", "rank00000-100"),
        ("dropped", "7 calls of rank 0 were not recorded"),
        ("simulated", "a dry run has no times"),
        ("nothing", "log"),
    ],
)
def test_a_log_that_is_not_whole_is_an_error_that_says_so(tmp_path: Path, damage: str, reason: str) -> None:
    folder = tmp_path / "run"
    if damage == "rank":
        data_parallel(folder, ranks=(0,))
    elif damage == "steps":
        data_parallel(folder, steps=1)
    elif damage == "simulated":
        data_parallel(folder, simulated=True)
    elif damage != "nothing":
        data_parallel(folder)
    tables = sorted(folder.rglob("*.jsonl"))
    if damage == "end":
        tables[1].write_text("".join(line for line in tables[1].open() if '"end"' not in line))
    elif damage == "dropped":
        tables[0].write_text(tables[0].read_text().replace('"dropped": 0', '"dropped": 7'))
    elif damage == "cut":
        segment = sorted(folder.rglob("*.npy"))[0]
        segment.write_bytes(segment.read_bytes()[:-100])
    with pytest.raises(LogError, match=reason):
        result_of(point(), folder)


def test_sections_say_what_they_lack(tmp_path: Path) -> None:
    pytest.importorskip("plotly")

    options = Options(models=(), quick=True)
    assert len(time_part.TimePart().sections(options, {})) == 1
    logs = {point().key: data_parallel(tmp_path / "a"), point(ZERO[0]).key: data_parallel(tmp_path / "b", ranks=(0,))}
    sections = time_part.TimePart().sections(options, logs)
    assert [section.number for section in sections] == ["1 and 2", "14, times", "15, times", ""]
    missing = " ".join(sections[0].missing)
    assert "ZeRO-1, hidden 256, sequence 128, time 1: " in missing
    assert "rank 1 left no log" in missing
    assert "DDP, hidden 256, sequence 256, time 1; ZeRO-1, hidden 256, sequence 256, time 1; " in missing
    assert sections[3].missing[-1].startswith("messages, connections made at once, time 1; messages")
    assert not sections[3].figures


@pytest.mark.long
def test_the_command_shows_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    facts = {"title": "t", "command": "c", "ended": "2026-11-21 18:00:00", "wall_seconds": 1.0, "cpu_seconds": 1.0}
    for study_point, make in ((point(), data_parallel), (point(PIPELINE), pipeline)):
        folder = make(tmp_path / "time" / study_point.key)
        (folder / "experiment.json").write_text(json.dumps(facts))
    arguments = [str(tmp_path), "--part", "time", "--quick", "--no-run"]
    assert main(arguments) == 1  # 2 of 14 experiments
    page = (tmp_path / "study.html").read_text()
    assert "The cold first receive of a pipeline" in page
    assert "echo &#39;{&#34;num_layers&#34;: 4" in page
    claims = {claim["key"]: claim for claim in json.loads((tmp_path / "data" / "claims.json").read_text())["claims"]}
    assert claims["cold-small-message"]["verdict"] == REFINED
    points = pd.read_csv(tmp_path / "data" / "time_points.csv").set_index("scheme")
    assert points.loc["DDP", "step_ns"] == 2_000 * US
    assert main([*arguments, "--nproc", "1"]) == 1
    assert "--nproc 1: one rank has nobody to communicate with" in capsys.readouterr().err


def test_every_point_is_run_before_any_is_run_again() -> None:
    plan = points(2, quick=False)
    assert len({entry.key for entry in plan}) == len(plan)
    repeats = [entry.repeat for entry in plan]
    assert repeats == sorted(repeats)
    assert len(plan) == 3 * repeats.count(1)
    assert {entry.scheme.name for entry in plan} == {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor", "pipeline"}
    assert "ZeRO-1 and tensor" in {scheme.name for scheme in schemes(4)}
    assert {scheme.name for scheme in schemes(3)} == {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"}
    with pytest.raises(CommtraceError, match="--nproc 1"):
        points(1, quick=True)


def test_the_machines_work_is_read(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 50 1000 200 5 5 30 40 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    import os

    assert machine_load.busy_seconds(stat) == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))
    assert machine_load.busy_seconds(tmp_path / "none") is None
    stat.write_text("intr 1 2\n")
    assert machine_load.busy_seconds(stat) is None
    assert machine_load.read(tmp_path) == {}


@pytest.mark.exhaustive
def test_a_real_pipeline_and_real_messages(tmp_path: Path) -> None:
    """A training of two stages and messages on new connections, run as in the study, give complete tables."""
    pytest.importorskip("deepspeed")

    training, alone = point(PIPELINE, seq_length=32, hidden=64), messages(quick=True)[1]
    for experiment, folder in ((training, tmp_path / "pipeline"), (alone, tmp_path / "messages")):
        folder.mkdir()
        time_part.run(experiment, 2, folder)
    result = result_of(training, tmp_path / "pipeline")
    table = receives(result.calls)
    first = table.loc[table["when"].isin(["start", "first"]) & (table["rank"] == 1), ["what", "payload_bytes"]]
    assert [*first.itertuples(index=False, name=None)] == [
        ("handshake", 4), ("metadata", 1024), ("hidden states", 32 * 64 * 4), ("mask", 2 * 32 * 32)
    ]  # fmt: skip
    assert table["transfer_ns"].notna().all()
    assert (table["late_ns"] + table["transfer_ns"]).eq(table["receive_ns"]).all()
    steps = tables_of([result])["time_steps"]
    parts = steps[["computing_ns", "overlapped_ns", "communicating_ns", "waiting_ns"]]
    assert parts.ge(0).all(axis=None)
    assert parts.sum(axis=1).eq(steps["step_ns"]).all()
    assert machine_load.read(tmp_path / "pipeline")["cpu_seconds"] > 0
    times = message_times([(alone, complete_run(tmp_path / "messages", 2))])
    assert set(times["what"]) == {"first on its connection", "later", "later, into untouched memory"}
    assert times.groupby("payload_bytes").size().nunique() == 1
