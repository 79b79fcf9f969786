"""Tables of a report, of its figures, and of a comparison with a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.formatting import format_bandwidth, format_count, format_moment, is_known

from . import shared_columns as shared
from .spec import TableSpec, column, count, duration, text_column, word_column
from .step_time_specs import STEP_TIME_TABLES

_BY_PAYLOAD: Final = "A row per {}, the largest payload first."

_WAITS_SHOWN: Final = "calls duration_ns wait_ns wait_min_ns wait_max_ns transfer_ns wait_share"

REPORT_TABLES: Final = (
    TableSpec("stuck_calls", "Calls that do not end",
        "A row per stuck call, those that others wait for first. No rows if the run ended, or was interrupted, without "
        "one.", (
        shared.OP,
        shared.ranks_column("group_ranks", "ranks", "Ranks that the call needs: of the group, or sender and receiver."),
        column("", format_count, "seq", "number",
            "Sequence number in its group, or for its sender, receiver and tag, from 0; missing for a receive from any "
            "source or with any tag."),
        shared.ranks_column("waiting_ranks", "waiting", "Ranks that are in the call."),
        shared.ranks_column("absent_ranks", "absent", "Ranks that did not enter it, or ended in it."),
        text_column("disagreement", "disagreement",
            '"operation", "size", "dtype", "root", "tag", "communicator" or "order", and how; "" if the ranks agree.'),
        column("ns", format_moment, "since_ns", "since",
            "When the first waiting rank entered it, since 1970-01-01 UTC."),
        duration("waited_ns", "for", "Lower bound of the time that a rank waited; 0 if none waits."),
        replace(shared.SITE, meaning='Call site of the ranks that are in it; "" if it was not recorded.'),
    ), merge_by="group_ranks"),
    TableSpec("stuck_ranks", "Ranks of calls that do not end", "A row per stuck call and rank that it needs.", (
        column("", str, "stuck_call", "call", "Row of the call in `stuck_calls`, from 0."),
        shared.RANK,
        word_column("part", "part", '"waiting": in it; "absent": not in it, or ended in it; "done": completed it.'),
        text_column("call", "last call", "The call, or the last one of a rank that did not enter it."),
        word_column("state", "state", "State of that call; missing if the rank made no call."),
        column("ns", format_moment, "begin_ns", "since", "When it began, since 1970-01-01 UTC."),
        shared.SITE,
        word_column("end", "process",
            '"runs": it ran when the report was made; "exit": it closed its log; "died": it did not; "unknown": it '
            "runs, or died, on another host."),
        column("ns", format_moment, "alive_ns", "last seen", "When the process was last known to be alive."),
    ), merge_by="rank"),
    TableSpec("host_time", "Times of calls, observed on the host", "A row per operation and measure.", (
        shared.OP,
        word_column("measure", "measure",
            '"in_call": inside the call; "waiting": from the start of a wait to the end, if the program waited and '
            'the host observed the end; "to_completion": from the call to its end, if it was observed.'),
        count("calls_known", "known", "Calls whose time is known."),
        count("calls_unknown", "not known",
            "Calls whose time is not known, including all calls of dry runs and graph captures."),
        duration("p50_ns", "p50", "Median of the known times, within 1 %."),
        duration("p99_ns", "p99", "99th percentile of the known times, within 1 %."),
        duration("max_ns", "max", "Longest of the known times."),
        duration("sum_ns", "sum", "Sum of the known times; calls that overlap are each counted in full."),
    ), {"terminal": "op calls_known calls_unknown p50_ns p99_ns max_ns sum_ns"}),
    TableSpec("bandwidth", "Bandwidth",
        "A row per operation and kind of end, over calls that have a payload and an observed end, in groups of two or "
        "more ranks, outside coalesced batches.", (
        shared.OP,
        word_column("end_seen_by", "completion seen by",
            'What observed the end. With "wait" or "poll" it may have been earlier: bandwidths are lower bounds.'),
        shared.CALLS, shared.PAYLOAD,
        duration("time_ns", "time", "Sum of times from the start on the device, else from the call, to the end."),
        column("GB/s", format_bandwidth, "algbw_gb_per_s", "algbw", "Payload / time; 1 GB is 1e9 bytes."),
        column("GB/s", format_bandwidth, "busbw_gb_per_s", "busbw",
            "algbw times nccl-tests' factor of each call's group; missing for operations without a factor."),
    )),
    TableSpec("clocks", "Clocks of the hosts",
        "A row per host (per boot of it). Bounds follow from the calls of the log; a host that they do not bound "
        "has missing values.", (
        word_column("host", "host", "Host name."),
        word_column("reference", "reference", "Host that it is compared with."),
        column("ns", format_count, "offset_ns", "offset",
            "Its monotonic clock minus the reference's in the middle of the run: the middle of the bounds."),
        column("ppm", lambda rate: f"{rate:+.1f}" if is_known(rate) else "-", "drift_ppm", "drift, ppm",
            "Mean growth of the offset: the middle of its bounds."),
        column("ppm", lambda rate: f"{rate:.1f}" if is_known(rate) else "-", "drift_half_width_ppm", "+-",
            "Half the distance between the bounds of drift_ppm."),
        duration("half_width_ns", "offset +-", "Half the largest distance between the bounds of the offset."),
        count("calls", "calls", "Calls of the host that gave bounds.", measured=True),
        count("steps", "steps", "Jumps of the clock (`clock_steps`)."),
    ), merge_by="host"),
    TableSpec("clock_steps", "Clock jumps",
        "A row per jump of a host's clock: the bounds before and after it contradict each other.", (
        word_column("host", "host", "Host name."),
        word_column("reference", "reference", "Host that it is compared with."),
        column("ns", format_count, "after_ns", "after", "Time after which it jumped, on the reference's clock."),
        column("ns", format_count, "before_ns", "before", "Time before which it jumped."),
        column("ns", format_count, "smallest_ns", "at least", "Lower bound of the jump."),
        column("ns", format_count, "largest_ns", "at most", "Upper bound of the jump."),
    ), merge_by="host"),
    TableSpec("waiting", "Waiting for other ranks", "One row, for a sample of the operations.", (
        count("every", "every n-th", "n: the sample is every n-th operation of each group; 1: all."),
        *shared.WAITS,
    )),
    *(
        TableSpec(f"waits_by_{name}", f"Wait and transfer by {noun}",
            f"A row per {noun}, {order}. Only calls of groups of two or more ranks.", (
            key, *shared.WAITS, *shared.BUS_BANDWIDTHS,
        ), {"terminal": f"{key.name} {_WAITS_SHOWN} busbw_gb_per_s transfer_busbw_gb_per_s"},
            merge_by="rank" if name == "rank" else "")
        for name, noun, key, order in (
            ("operation", "operation", shared.OP, "the longest wait first"),
            ("role", "dimension", shared.ROLE, "the longest wait first"),
            ("rank", "rank", shared.RANK, "ascending"),
            ("site", "call site", shared.SITE, "the longest wait first"),
            ("step", "step", shared.STEP, "ascending"),
        )
    ),
    TableSpec("wait_patterns", "Wait patterns", "A row per pattern, the longest wait first.", (
        word_column("pattern", "pattern",
            "Scalasca's name: \"wait at n x n\", \"wait at barrier\", \"late broadcast\" (and scatter), "
            "\"early reduce\" (and gather), \"late sender\", \"late receiver\"."),
        *shared.WAITS,
    ), {"terminal": f"pattern {_WAITS_SHOWN}"}),
    *STEP_TIME_TABLES,
)  # fmt: skip
"""Tables in every JSON report; empty if not applicable."""
