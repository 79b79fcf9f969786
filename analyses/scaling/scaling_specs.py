"""Descriptions of the tables of runs by number of ranks, and the sections that show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.analyses.sections import Section
from commtrace.analyses.table_specs.shared_columns import RANK, RUN
from commtrace.analyses.table_specs.spec import (
    TableSpec,
    bytes_column,
    column,
    count,
    duration,
    ratio,
    share,
    text_column,
    text_of,
    word_column,
)
from commtrace.formatting import format_count, format_duration, is_known

_STEP_TIMES: Final = (
    duration("blocked_ns", "in communication", "Part of the step in which calls block the rank."),
    duration("late_ns", "waiting for late ranks",
        "Part of blocked_ns before the last rank that the call depends on arrives."),
    duration("in_flight_ns", "in flight", "Part of the step in which a call is in progress, even in the background.",
        optional=True),
)  # fmt: skip
_STEP_VOLUMES: Final = (
    column("count", lambda calls: format_count(round(calls, 1)) if is_known(calls) else "-", "calls", "calls",
        "Calls of a rank in a step."),
    bytes_column("payload_bytes", "payload", "Payload of a rank's step; a message counts where it is sent."),
    bytes_column("wire_bytes", "wire (min)", "Wire bytes of a rank's step; missing if not known for every call."),
)  # fmt: skip
_COMPUTE: Final = duration("compute_ns", "computation",
    "Step time minus blocked_ns; missing if ends were observed on a device.")  # fmt: skip
_STEP_NS: Final = duration(
    "step_ns",
    "step time",
    "From the end of the last call of the previous step to that of the step; mean of the slowest rank's steps.",
)
_SPEEDUP: Final = (
    column("ratio", lambda value: f"{value:.2f}x" if is_known(value) else "-", "speedup", "speedup",
        "Against the run with the fewest ranks, per token; without tokens, as if each step had the same work."),
    share("efficiency", "efficiency", "Speedup / ratio of the numbers of ranks."),
)  # fmt: skip
_RANKS: Final = count("ranks", "ranks", "Ranks of the job.")

SCALING: Final = TableSpec("scaling", "Runs by number of ranks",
    "A row per run, by ranks. Times and volumes are of one training step; means over the ranks, except step_ns.", (
    RUN, _RANKS,
    count("hosts", "hosts", "Hosts of the ranks.", optional=True),
    count("steps", "steps", "Measured steps; 0 if the program marks none, and the whole run counts as one."),
    _STEP_NS,
    count("tokens_per_step", "tokens",
        "Tokens of a step of the whole job; missing if neither the log nor --tokens has them."),
    column("tokens/s", lambda rate: format_count(round(rate)) if is_known(rate) else "-", "tokens_per_s",
        "tokens/s", "Tokens of the whole job per second."),
    *_SPEEDUP, _COMPUTE, *_STEP_TIMES, *_STEP_VOLUMES,
    bytes_column("closed_form_bytes", "closed form", "Wire bytes of the lowest rank by the closed form."),
    bytes_column("expected_wire_bytes", "expected", "Wire bytes of the lowest rank that theory expects."),
    ratio("communication_per_compute", "comm/compute", "blocked_ns / compute_ns."),
    share("late_known", "late known", "Share of blocked_ns of which it is known whether it is late_ns."),
    text_column("shared_cores", "", 'Such as "4 ranks on 2 cores" if ranks of a host share cores, else "".'),
), {
    "speedup": "run ranks hosts steps step_ns speedup efficiency tokens_per_s",
    "step_parts": "run ranks compute_ns blocked_ns late_ns in_flight_ns communication_per_compute",
    "sent": "run ranks calls payload_bytes wire_bytes expected_wire_bytes closed_form_bytes",
})  # fmt: skip
SCALING_RANKS: Final = TableSpec("scaling_ranks",
    "Ranks of the runs", "A row per run and rank: means over its steps.", (
    RUN, RANK,
    replace(_STEP_NS, meaning="Duration of a step."),
    *_STEP_TIMES, *_STEP_VOLUMES, _COMPUTE,
), merge_by="rank")  # fmt: skip
SCALING_FITS: Final = TableSpec("scaling_fits", "Fitted models", "A row per fitted number.", (
    word_column("model", "model", "Name of the model."),
    word_column("parameter", "parameter", "Its parameter."),
    column("see unit", text_of, "value", "value", "The fitted number."),
    word_column("unit", "unit", "Unit of the value."),
    share("error", "error",
        "Largest relative difference from the runs, for latency and bandwidth the mean from the calls; missing if "
        "there are too few runs."),
))  # fmt: skip
SCALING_PROJECTION: Final = TableSpec("scaling_projection", "The model, and more ranks",
    "A row per number of ranks: those that were run and, if the model fits, 2, 4 and 8 times the largest.", (
    _RANKS,
    replace(_STEP_NS, meaning="Duration of a step by the model."),
    column("ns", lambda value: format_duration(value) if is_known(value) else "not run", "measured_ns", "measured",
        "Measured duration of a step; missing if not run."),
    *_SPEEDUP,
    duration("compute_ns", "computation", "Part of it that is computation."),
    duration("latency_ns", "latency", "Part of it that is latency of calls."),
    duration("bandwidth_ns", "bandwidth", "Part of it that is transfer of bytes."),
    duration("late_ns", "waiting", "Part of it that is waiting for late ranks."),
), {"model": "ranks step_ns measured_ns efficiency compute_ns latency_ns bandwidth_ns late_ns"})  # fmt: skip
SCALING_LEFT_OUT: Final = TableSpec("scaling_left_out", "Runs left out", "A row per run that was not compared.", (
    RUN,
    text_column("reason", "reason", "Why it was left out."),
))  # fmt: skip

SCALING_SETTINGS: Final = TableSpec("scaling_settings", "Settings in which the runs differ, apart from their size",
    "A row per setting and run.", (
    word_column("name", "setting", "Name of the setting, as in the table `setup`."),
    RUN,
    text_column("value", "value", 'Its values; "-": not set.'),
))  # fmt: skip

TABLES: Final = (SCALING, SCALING_RANKS, SCALING_FITS, SCALING_PROJECTION, SCALING_LEFT_OUT, SCALING_SETTINGS)

SECTIONS: Final = (
    Section("speedup", "Speed", (SCALING,), view="speedup"),
    Section("step_parts", "Where the time of a step goes, means over the ranks", (SCALING,), view="step_parts"),
    Section(
        "sent",
        "What a rank sends in a step",
        (SCALING,),
        view="sent",
        look_for="Means over the ranks. Expected bytes and the closed form are of the lowest rank, if the job has "
        "rules.",
    ),
    Section(
        "model",
        "The model: computation, latency, bandwidth, waiting",
        (SCALING_PROJECTION,),
        view="model",
        look_for="Fixed and divided computation, latency and bandwidth of calls, and waiting for late ranks.",
        absent="No model: calls have one size only, or their times are not known.",
    ),
)
"""The sections of the report, in its order."""
