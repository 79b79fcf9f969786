"""Tables of a report, of its figures, and of a comparison with a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.formatting import format_bandwidth, format_count, format_small_share, is_known

from .shared_columns import (
    BELOW,
    CALLS,
    COUNTERS,
    FIRST_ERROR,
    FROM,
    NOT_FOUND,
    OP,
    PAYLOAD,
    PAYLOAD_SHARE,
    PER_RANK,
    PHASE,
    RANK,
    ROLE,
    SITE,
    STEP,
    SUM,
    VOLUME,
    WATERFALL,
    WIRE,
)
from .spec import TableSpec, column, count, duration, flag, prose, ratio_text, share, size, text_of, word

_BY_PAYLOAD: Final = "A row per {}, the largest payload first."

REPORT_TABLES: Final = (
    TableSpec(
        "coverage", "What the log covers", "One row.",
        (
            word("run", "run", "Identifier of the run."),
            count("ranks_seen", "ranks seen", "Ranks that left a log."),
            count("world_size", "world size", "Ranks of the job; missing if no process recorded it."),
            prose("ranks_missing", "", 'Ranks that left no log, such as "2-3,7"; "" if there is none.'),
            count("hosts", "", "Hosts of the ranks seen."),
            count("processes", "", "Processes that left a log."),
            count("without_end", "", "Processes that are alive or ended without closing their log."),
            count("records", "", "Calls in the log."),
            *COUNTERS,
            NOT_FOUND,
            count("simulated", "", "Processes of a dry run, which sends nothing."),
            FIRST_ERROR,
            count("files_cut", "", "Files of the log whose end is missing."),
            count("files_foreign", "", "Files in the directory that are not of this run."),
            count("files_unreadable", "", "Files of the log that could not be read."),
            count("files_missing", "", "Files of the log that are not there."),
            count("files_garbled", "", "Files of the log with contents that make no sense."),
        ),
    ),
    TableSpec(
        "states", "How far calls came", "A row per state, the most frequent first.",
        (
            word(
                "state", "state",
                '"complete": its end is known; "returned": its end was not seen; "unobservable": the recorder cannot '
                'see its end; "begun": it was in progress when the log ended; "failed": it raised an exception.',
            ),
            count("calls", "calls", "Calls in this state."),
            share("share", "share", "Share of all calls."),
        ),
    ),
    TableSpec(
        "processes", "Processes", "A row per process.",
        (
            RANK,
            word("host", "host", "Host name."),
            column("", text_of, "pid", "pid", "Process identifier."),
            word("recorder", "recorder", '"native" or "python".'),
            flag("simulated", "", "Whether it is a process of a dry run."),
            column("ns", format_count, "started_unix_ns", "started", "Start, since 1970-01-01 UTC."),
            count("records", "", "Its calls in the log."),
            *COUNTERS,
            FIRST_ERROR,
            word("end", "end", "How it ended; missing if it is alive or ended without closing its log."),
            NOT_FOUND,
        ),
    ),
    TableSpec(
        "blind_spots", "What the hooks cannot see", "A row per blind spot.",
        (
            prose("blind_spot", "blind spot", "What is not observed."),
            count("processes", "", "Processes that it applies to."),
        ),
    ),
    TableSpec(
        "notes", "Damage of the log", "A row per note.",
        (
            word("kind", "kind", 'What is wrong: "cut", "foreign", "unreadable", "missing", "garbled" ...'),
            prose("path", "path", "File or directory."),
            prose("what", "what", "What is wrong with it."),
            prose("consequence", "consequence", "What follows for the numbers of the report."),
        ),
    ),
    TableSpec(
        "tracing_cost", "What tracing cost", "A row per process that wrote its counters.",
        (
            RANK,
            column("", text_of, "pid", "pid", "Process identifier."),
            count("calls", "calls", "Calls that were recorded or counted."),
            duration("mean_ns", "mean", "Processor time of recording one call, mean of samples of this run."),
            duration("p99_ns", "p99", "Its 99th percentile."),
            count("first_calls", "first calls", "Calls that met a call site, operator or group for the first time."),
            duration("first_mean_ns", "first mean", "Cost of recording one of them, where it was counted."),
            duration("steady_mean_ns", "steady mean", "Cost of recording one of the other calls, by samples."),
            duration("calls_ns", "all calls", "mean_ns times calls."),
            duration("drain_ns", "writing", "Processor time of the thread that writes the log."),
            duration("span_ns", "run", "From the process's first line in the log to its last."),
            column("fraction", format_small_share, "share", "share", "(calls_ns + drain_ns) / span_ns."),
        ),
    ),
    TableSpec("volume_by_operation", "Volume by operation", _BY_PAYLOAD.format("operation"), (OP, *VOLUME)),
    TableSpec(
        "volume_by_role", "Volume by parallel dimension", _BY_PAYLOAD.format("dimension"), (ROLE, *VOLUME)
    ),
    TableSpec(
        "volume_by_role_and_operation", "Volume by parallel dimension and operation",
        _BY_PAYLOAD.format("dimension and operation"), (ROLE, OP, *VOLUME),
    ),
    TableSpec("volume_by_phase", "Volume by phase", _BY_PAYLOAD.format("phase"), (PHASE, *VOLUME)),
    TableSpec(
        "volume_by_site", "Volume by call site", _BY_PAYLOAD.format("call site and operation"),
        (SITE, OP, CALLS, PAYLOAD, replace(WIRE, optional=True), replace(PAYLOAD_SHARE, head="share")),
    ),
    TableSpec(
        "whole_job", "Volume of the whole job, of a dry run",
        "A row per part and operation. Calls of a rank that ran count for all ranks that it stands for. No rows unless "
        "the ranks that ran stand for all ranks of the job.",
        (
            word("part", "part", '"start-up" or "training steps".'),
            OP,
            count("calls", "calls", "Calls of all ranks of the job."),
            size("payload_bytes", "payload", "Their payload."),
            size("wire_bytes", "wire (min)", "Least bytes that all ranks must send for them."),
        ),
    ),
    TableSpec(
        "volume_by_step", "Volume by step", "A row per step, ascending.", (STEP, CALLS, PAYLOAD, WIRE)
    ),
    TableSpec(
        "steady_step", "A training step",
        'A row per operation, by payload, and a first one for "all". No rows if the log has no training step.',
        (
            OP,
            count("calls_per_rank", "calls", "Calls of the median step, per rank seen."),
            size("payload_bytes_per_rank", "payload", "Payload of the median step, per rank seen."),
            size("wire_bytes_per_rank", "wire (min)", "Wire bytes of the median step, per rank seen."),
            size("payload_bytes_min", "", "Payload of the smallest step, summed over the ranks seen."),
            size("payload_bytes_max", "", "Payload of the largest step, summed over the ranks seen."),
            count("steps", "steps", "Training steps in the log."),
            count("differing_steps", "", "Steps whose calls or payload are not the median ones.", optional=True),
        ),
        {"terminal": ("op", "calls_per_rank", "payload_bytes_per_rank", "wire_bytes_per_rank", "differing_steps")},
    ),
    TableSpec(
        "message_sizes", "Exact message sizes", "A row per operation and payload, ascending.",
        (
            OP,
            column("bytes", format_count, "payload_bytes", "bytes of a call", "Payload of one call."),
            CALLS,
            SUM,
        ),
    ),
    TableSpec(
        "message_size_bins", "Message sizes by powers of two", "A row per operation and bin, ascending.",
        (OP, FROM, BELOW, CALLS, SUM),
    ),
    TableSpec(
        "host_time", "Times of calls, as the host saw them", "A row per operation and measure.",
        (
            OP,
            word(
                "measure", "measure",
                '"in_call": inside the call; "waiting": from the begin of a wait to the end, if the program waited and '
                'the host saw the end; "to_completion": from the call to its end, if anything saw the end.',
            ),
            count("calls_known", "known", "Calls whose time is known."),
            count("calls_unknown", "not known", "Calls whose time is not known; all of dry runs and graph captures."),
            duration("p50_ns", "p50", "Median of the known times, within 1 %."),
            duration("p99_ns", "p99", "99th percentile of the known times, within 1 %."),
            duration("max_ns", "max", "Longest of the known times."),
            duration("sum_ns", "sum", "Sum of the known times; calls that overlap are each counted in full."),
        ),
        {"terminal": ("op", "calls_known", "calls_unknown", "p50_ns", "p99_ns", "max_ns", "sum_ns")},
    ),
    TableSpec(
        "bandwidth", "Bandwidth",
        "A row per operation and kind of end, over calls with a payload whose end was seen, of groups of two or more, "
        "outside of coalesced batches.",
        (
            OP,
            word(
                "end_seen_by", "end seen by",
                'What saw the end. Ends that "wait" or "poll" saw may have been earlier: these are lower bounds.',
            ),
            CALLS,
            PAYLOAD,
            duration("time_ns", "time", "Sum of times from the start on the device, else from the call, to the end."),
            column("GB/s", format_bandwidth, "algbw_gb_per_s", "algbw", "Payload / time; 1 GB is 1e9 bytes."),
            column(
                "GB/s", format_bandwidth, "busbw_gb_per_s", "busbw",
                "algbw times nccl-tests' factor of each call's group; missing for operations without a factor.",
            ),
        ),
    ),
    TableSpec(
        "ranks", "Balance of the ranks", "A row per rank that left a log, ascending.",
        (
            RANK,
            count("calls", "calls", "Its calls."),
            size("payload_bytes", "payload", "Its payload."),
            size("wire_bytes", "wire (min)", "Least bytes that it must send."),
            count("training_calls", "", "Its calls without those of start-up."),
            size("training_payload_bytes", "in training steps", "Its payload without that of start-up."),
            column("ratio", ratio_text, "payload_of_median", "x median", "In training / that of the median rank."),
        ),
        {"terminal": ("rank", "calls", "payload_bytes", "wire_bytes", "training_payload_bytes", "payload_of_median")},
    ),
    TableSpec(
        "theory", "Agreement with theory", "A row per process. Bytes are payload over start-up and all steps.",
        (
            RANK,
            word("scheme", "scheme", "Scheme whose rules predict the job; missing if it is not predicted."),
            prose("not_predicted", "", "Why the process is not compared; missing if it is."),
            prose("other_versions", "", "Libraries whose version is not the one that the rules were written from."),
            size("expected_bytes", "expected", "Payload that theory expects."),
            size("measured_bytes", "measured", "Payload in the log."),
            size("matched_bytes", "matched", "Payload of calls that are as expected."),
            size("named_bytes", "known cause", "Payload of other and of missing calls whose cause is known."),
            size("unexplained_bytes", "unexplained", "Payload of other and of missing calls without a known cause."),
            share("matched_share", "matched share", "matched_bytes / measured_bytes."),
        ),
    ),
    TableSpec(
        "expected", "Expected calls", "A row per rank, step, dimension and operation.",
        (
            RANK, STEP, ROLE, OP,
            count("calls", "calls", "Calls that theory expects."),
            count("calls_max", "calls, at most", "Most calls in any order of modules; missing if certain."),
            size("payload_bytes", "payload", "Their payload; an upper bound if it depends on the data."),
            size("payload_bytes_min", "payload, at least", "Lower bound of their payload; missing if it is certain."),
        ),
    ),
    TableSpec(
        "reconciliation", "Expected and recorded calls",
        "Rows per rank, step, dimension, operation and cause. Calls are compared by size; from step 64 on by "
        "number and bytes.",
        (
            RANK, STEP, ROLE, OP,
            count("expected_calls", "expected calls", "Calls that theory expects."),
            count("measured_calls", "measured calls", "Calls in the log."),
            size("expected_bytes", "expected", "Payload that theory expects."),
            size("measured_bytes", "measured", "Payload in the log."),
            column(
                "bytes", lambda value: f"{value:+,.0f}" if is_known(value) else "-", "difference_bytes",
                "difference, bytes", "measured_bytes - expected_bytes.",
            ),
            prose("cause", "cause", '"expected" if equal, else the cause of the difference, or "unexplained".'),
            prose("sites", "call sites", "Call sites of the measured calls, separated by semicolons."),
        ),
        {"page": ("role", "op", "cause", "expected_calls", "measured_calls", "difference_bytes", "sites")},
    ),
    TableSpec(
        "waterfall", "From the closed form to the measured wire bytes",
        "Rows in the order of the sum, for the last whole step of the lowest rank that is compared.",
        WATERFALL,
        {"page": ("label", "bytes")},
    ),
    TableSpec(
        "waterfall_by_role", "From the closed form to the measured wire bytes, by parallel dimension",
        "Rows in the order of the sum, dimension by dimension. No rows if the closed form is of one dimension.",
        (ROLE, *WATERFALL), {"page": ("role", "label", "bytes")},
    ),
)  # fmt: skip
"""In every document of `commtrace report --json`; without rows if one does not apply to a run."""

FIGURE_TABLES: Final = (
    TableSpec(
        "steps_by_operation", "Volume and time of each step", "A row per step and operation.",
        (
            STEP, OP, *PER_RANK,
            duration("in_call_ns_per_rank", "in calls", "Time inside calls, per rank seen; missing if not known."),
            duration("waiting_ns_per_rank", "waiting", "Time waiting for ends, per rank seen."),
            duration("to_completion_ns_per_rank", "to completion", "Time from calls to their ends, per rank seen."),
        ),
    ),
    TableSpec(
        "timeline", "The calls of one training step",
        "A row per call, by rank and time, of one step that was complete on every rank shown.",
        (
            RANK, STEP, OP, ROLE, PHASE, SITE,
            size("payload_bytes", "payload", "Payload of the call."),
            duration("begin_ns", "begin", "Begin of the call since the first call, by the hosts' wall clocks."),
            duration("in_call_ns", "in call", "Time inside the call; missing if not known."),
            duration("to_completion_ns", "to completion", "Time from the call to its end; missing if not seen."),
            flag("more_calls", "", "Whether the rank made more calls in this step than the table keeps."),
        ),
    ),
    TableSpec(
        "sizes_over_time", "Message sizes over time",
        "A row per span of time, operation and bin of sizes. Calls of processes without a wall clock are left out.",
        (
            column("s", text_of, "from_s", "from", "Begin of the span, since the run's first call."),
            column("s", text_of, "below_s", "below", "End of the span."),
            OP, FROM, BELOW, CALLS, SUM,
        ),
    ),
)  # fmt: skip
"""Only figures are drawn from them."""

NETWORK_TABLES: Final = (
    TableSpec(
        "network", "Against a network",
        "A row per operation, ranks and hosts of the group, and payload; the longest expected time in all first.",
        (
            OP,
            count("ranks", "ranks", "Ranks of the group."),
            count("hosts", "hosts", "Hosts of the group; missing if not all of its ranks left a log."),
            size("payload_bytes", "payload", "Payload of one call."),
            count("calls", "calls", "Calls of all ranks seen."),
            count(
                "timed", "timed", "Operations whose transfer time is known, each counted once for its group; of long "
                "runs a sample.", optional=True,
            ),
            duration("measured_ns", "measured", "Median transfer time: what the last rank spends in the operation."),
            duration("expected_ns", "expected", "Time that the network should take for one call."),
            duration("latency_ns", "of it latency", "Part of expected_ns that does not depend on the size."),
            word(
                "how", "how",
                'Source of expected_ns: "fitted" to this operation and group, "extrapolated", "described" or "local".',
                optional=True,
            ),
            share("efficiency", "efficiency", "expected_ns / measured_ns."),
            prose("why_not", "why not", "Why there is no measured or no expected time; missing if there are both."),
        ),
        {
            "terminal": (
                "op", "ranks", "payload_bytes", "calls", "timed", "measured_ns", "expected_ns", "efficiency", "how",
            ),
            "page": (
                "op", "ranks", "hosts", "payload_bytes", "calls", "timed", "measured_ns", "expected_ns", "latency_ns",
                "efficiency", "how", "why_not",
            ),
        },
    ),
    TableSpec(
        "network_used", "The network", "One row.",
        (
            word("name", "name", "Its name, or the path of its file."),
            prose("about", "about", "Where its numbers come from."),
        ),
    ),
)  # fmt: skip
"""Of a report with --network."""
