"""Imports of what DeepSpeed's CommsLogger prints and returns, and its known errors, which must not be imported."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commtrace
from commtrace.errors import ImportFileError
from commtrace.importing.formats import format_named
from commtrace.importing.import_run import import_files

HEADER = "".join(
    f"{head: <20}"
    for head in (
        "Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    )
)  # fmt: skip
PATTERN = [10.0, 1.5, 2.5, 4.0, 0.5, 3.0, 1.0, 2.0]


def row(size: str, count: int, total: float = 1.0) -> str:
    return f"{' ': <20}{size: <20}{count: <20}{total: <20.2f}{total / count: <20.2f}{0.4: <20.2f}{0.3: <20.2f}"


def table(*records: tuple[str, list[str]]) -> str:
    lines = [HEADER, *(line for name, rows in records for line in (name, *rows))]
    return "\n".join(lines) + "\n"


def imported(path: Path, content: object) -> commtrace.Run:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    out = path.with_name("log")
    import_files([path], out, format_named("deepspeed-comms"), force=True)
    return commtrace.open(out)


def volumes(run: commtrace.Run) -> dict[str, tuple[int, float]]:
    """Return the number of calls and the payload by operation."""
    rows: Any = run.table("volume_by_operation").itertuples()
    return {row.op: (row.calls, row.payload_bytes) for row in rows}


def blind_spots(run: commtrace.Run) -> str:
    return "\n".join(run.table("blind_spots")["blind_spot"])


def raw(latencies: list[float], size: int = 4096) -> dict[str, Any]:
    """Return raw data of one size, as CommsLogger computes it."""
    return {str(size): [len(latencies), latencies, [size / ms for ms in latencies], [size / ms for ms in latencies]]}


def completion(run: commtrace.Run) -> dict[str, tuple[int, int]]:
    """Return the number and the sum in us of the known durations by operation."""
    rows: Any = run.table("host_time").itertuples()
    return {row.op: (row.calls_known, row.sum_ns // 1000) for row in rows}


def test_a_summary_has_counts_and_sizes(tmp_path: Path) -> None:
    text = table(("broadcast", [row("2.0 KB", 146), row("512.0 B", 4)]), ("all_reduce", [row("1.5 MB", 3)]))
    run = imported(tmp_path / "out.txt", f"step 1: loss 3\n{text}done\n")
    assert volumes(run) == {"broadcast": (150, 146 * 2048 + 4 * 512), "all_reduce": (3, 3 * 3 << 19)}
    assert run.ranks == [0]
    assert run.source == "DeepSpeed CommsLogger (deepspeed-comms)"
    assert len(run.table("host_time")) == len(run.table("bandwidth")) == 0
    assert "sums of sums" in blind_spots(run)


def call_line(record: str, ms: float, size: str, bandwidth: float = 1.0) -> str:
    head = "[2026-11-20 10:00:00,123] [INFO] [logging.py:107:log_dist] [Rank 0] "
    bandwidths = f"algbw (Gbps): {bandwidth:.2f} | busbw (Gbps): {bandwidth / 2:.2f}"
    return f"{head}comm op: {record} | time (ms): {ms:.2f} | msg size: {size} | {bandwidths}\n"


def test_lines_of_single_calls(tmp_path: Path) -> None:
    sums = [*accumulate(PATTERN)]
    lines = [call_line("all_reduce", ms, "512.0 B", 4 / ms) for ms in sums]
    text = "step 1\n" + "".join(lines) + call_line("broadcast | [Caller Func: setup]", 3.0, "2.0 KB")
    run = imported(tmp_path / "out.txt", text)
    assert volumes(run) == {"all_reduce": (8, 8 * 512), "broadcast": (1, 2048)}
    assert completion(run)["all_reduce"] == (7, round(sum(PATTERN[1:]) * 1000))  # differences of sums
    assert "0.01 ms" in blind_spots(run)
    # A summary of some of these calls does not hide the others, and does not count them twice.
    both = imported(tmp_path / "both.txt", text + table(("all_reduce", [row("512.0 B", 3)])))
    assert volumes(both) == volumes(run)
    more = imported(tmp_path / "more.txt", text + table(("all_reduce", [row("512.0 B", 30)])))
    assert volumes(more) == {"all_reduce": (30, 30 * 512)}
    odd = call_line("all_reduce", 1.0, "9" * 18 + " YB"), call_line("all_reduce", 1e14, "512.0 B")
    impossible = imported(tmp_path / "impossible.txt", text + "".join(odd))
    assert volumes(impossible) == volumes(run)
    assert any("2 of its rows" in note.text for note in impossible.notes)


def test_sizes_of_the_table_are_rounded_and_not_shown_as_exact(tmp_path: Path) -> None:
    records = [("all_reduce", [row("6.31 KB", 7), row("512.0 B", 2)]), ("all_gather", [row("1.0 KB", 1)])]
    run = imported(tmp_path / "out.txt", table(*records))
    assert run.table("message_sizes")["payload_bytes"].tolist() == [512]
    assert volumes(run)["all_reduce"] == (9, 7 * round(6.31 * 1024) + 2 * 512)
    assert "exact sizes" in blind_spots(run)


@pytest.mark.parametrize("name", ["all_gather", "all_gather_into_tensor", "gather", "scatter"])
def test_the_size_of_a_share_is_no_payload(tmp_path: Path, name: str) -> None:
    run = imported(tmp_path / "out.txt", table((name, [row("1.0 MB", 4)])))
    ((calls, payload),) = volumes(run).values()
    assert (calls, np.isnan(payload)) == (4, True)
    assert "4.00 MiB in all, are of one rank's share" in blind_spots(run)


def test_reduce_scatter_has_its_full_input_and_unknown_wire_bytes(tmp_path: Path) -> None:
    run = imported(tmp_path / "out.txt", table(("reduce_scatter_tensor", [row("1024.0 B", 4)])))
    assert volumes(run) == {"reduce_scatter": (4, 4096)}
    assert run.table("volume_by_operation")["wire_bytes"].isna().all()


def test_objects_have_no_size_and_barriers_have_none_to_send(tmp_path: Path) -> None:
    records = [(name, [row("0B", 2)]) for name in ("broadcast_object_list", "barrier", "batch_isend_irecv")]
    run = imported(tmp_path / "out.txt", table(*records))
    assert {op: (calls, bool(np.isnan(payload))) for op, (calls, payload) in volumes(run).items()} == {
        "broadcast": (2, True), "barrier": (2, False), "unknown": (2, True),
    }  # fmt: skip


def test_callers_are_call_sites(tmp_path: Path) -> None:
    text = table(("all_reduce | [Caller Func: allreduce_bucket]", [row("2.0 KB", 3)]))
    run = imported(tmp_path / "out.txt", text)
    assert run.table("volume_by_site")["site"].tolist() == ["allreduce_bucket"]


def test_the_breakdown_of_stragglers_does_not_count_again(tmp_path: Path) -> None:
    text = table(("all_reduce", [row("2.0 KB", 3)]))
    header = HEADER.replace("Total Latency(ms)", "Total comm lat(ms)")
    breakdown = f"___\nBreakdown with straggler effect\n---\n{header}\nall_reduce\n{row('2.0 KB', 3)}\n"
    assert volumes(imported(tmp_path / "out.txt", text + breakdown)) == {"all_reduce": (3, 3 * 2048)}


def test_a_later_summary_replaces_those_that_it_continues(tmp_path: Path) -> None:
    first = table(("all_reduce", [row("2.0 KB", 3, 5.0)]))
    longer = table(("all_reduce", [row("2.0 KB", 7, 9.0)]), ("broadcast", [row("1.0 KB", 1)]))
    after_reset = table(("all_reduce", [row("2.0 KB", 7, 8.0)]))
    run = imported(tmp_path / "out.txt", first + longer)
    assert {op: calls for op, (calls, _) in volumes(run).items()} == {"all_reduce": 7, "broadcast": 1}
    run = imported(tmp_path / "out.txt", first + longer + after_reset)
    assert {op: calls for op, (calls, _) in volumes(run).items()} == {"all_reduce": 14, "broadcast": 1}
    assert "which of the 3 summaries" in blind_spots(run)


def test_prefixes_of_a_launcher_and_lines_between_rows(tmp_path: Path) -> None:
    lines = table(("all_reduce", [row("2.0 KB", 3), "finished", "loss 3.2", row("4.0 KB", 1)])).splitlines()
    run = imported(tmp_path / "out.txt", "\n".join(f"worker-0: {line}" for line in lines))
    assert volumes(run) == {"all_reduce": (4, 3 * 2048 + 4096)}


def test_rows_with_impossible_numbers_are_left_out(tmp_path: Path) -> None:
    bad = [row("9999.0 YB", 1), row("4.0 KB", 10**18)]
    run = imported(tmp_path / "out.txt", table(("all_reduce", [row("2.0 KB", 3), *bad])))
    assert volumes(run) == {"all_reduce": (3, 3 * 2048)}
    assert ["2 of its rows" in note.text for note in run.notes] == [True]


def test_a_returned_summary_has_exact_sizes_and_the_rank(tmp_path: Path) -> None:
    entry = {"count": 4, "total_latency_ms": 12.0, "avg_latency_ms": 3.0, "busbw_avg_gbps": 1.0, "msg_size_bytes": 4099}
    document = {
        "summary": {"all_reduce": {"4099": entry}},
        "straggler_analysis": {"all_reduce": {"4099": entry}},
        "metadata": {"world_size": 8, "rank": 3, "timestamp": "2026-01-01T00:00:00"},
    }
    run = imported(tmp_path / "summary.json", document)
    assert (run.ranks, run.world_size) == ([3], 8)
    assert run.table("message_sizes")[["payload_bytes", "calls"]].to_numpy().tolist() == [[4099, 4]]
    assert len(run.table("host_time")) == 0


def test_cumulative_latencies_are_undone_across_sizes(tmp_path: Path) -> None:
    """The timer of an operation counts all of its sizes: calls of 10, 1.5, 2.5 ... ms, in turn of two sizes."""
    sums = list(accumulate(PATTERN * 2))
    data = {"all_reduce": {**raw(sums[::2], 4096), **raw(sums[1::2], 8192)}}
    run = imported(tmp_path / "raw_rank5.json", data)
    assert run.ranks == [5]
    assert completion(run) == {"all_reduce": (15, round((2 * sum(PATTERN) - 10) * 1000))}
    (longest,) = run.table("host_time")["max_ns"]
    assert longest == 10_000_000
    assert "how long the first call of each operation took" in blind_spots(run)


def test_latencies_that_are_not_sums_are_kept(tmp_path: Path) -> None:
    run = imported(tmp_path / "raw.json", {"all_reduce": raw(PATTERN), "barrier": raw([1.0], 0)})
    assert completion(run) == {"all_reduce": (8, round(sum(PATTERN) * 1000)), "barrier": (1, 1000)}


def test_latencies_that_may_be_sums_or_sorted_are_left_out(tmp_path: Path) -> None:
    """Some versions of DeepSpeed sort each list: latencies and bandwidths then ascend."""
    ascending = sorted(PATTERN)
    data = {"all_reduce": {"4096": [8, ascending, sorted(1 / ms for ms in PATTERN), []]}}
    run = imported(tmp_path / "raw.json", data)
    assert len(run.table("host_time")) == 0
    assert "do not tell" in blind_spots(run)
    one_of_each_size = {"all_reduce": {**raw([10.0], 64), **raw([21.0], 128)}}
    assert len(imported(tmp_path / "raw.json", one_of_each_size).table("host_time")) == 0


def test_single_calls_are_their_own_sums(tmp_path: Path) -> None:
    run = imported(tmp_path / "raw.json", {"all_reduce": raw([10.0]), "broadcast": raw([2.0])})
    assert completion(run) == {"all_reduce": (1, 10_000), "broadcast": (1, 2000)}


@pytest.mark.long
@pytest.mark.parametrize(
    "entry", [7, [], [0, [], []], [2, [1.0], [1.0]], [2, [1.0, "x"], []], [2, [1.0, float("nan")], []], [-1, [], []]]
)
def test_raw_entries_of_wrong_types_have_no_durations(tmp_path: Path, entry: Any) -> None:
    run = imported(tmp_path / "raw.json", {"all_reduce": {"64": entry, "x": [1, [1.0], []]}, "broadcast": raw([2.0])})
    assert completion(run) == {"broadcast": (1, 2000)} or len(run.table("host_time")) == 0
    assert any("of its rows" in note.text for note in run.notes)


@pytest.mark.parametrize("content", ["", HEADER, "{}", "{", '{"summary": 7}', '{"summary": {"a": []}}', "step 1\n"])
def test_a_file_without_calls_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ImportFileError, match=r"bad\.txt.*(log_summary|json\.dump)"):
        imported(tmp_path / "bad.txt", content)


@pytest.mark.parametrize("content", [table(("all_reduce", [row("2.0 KB", 3)])), {"all_reduce": raw(PATTERN)}])
def test_the_format_is_told_from_the_contents(tmp_path: Path, content: object) -> None:
    path = tmp_path / "file"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert len(commtrace.open(path).table("volume_by_operation")) == 1
