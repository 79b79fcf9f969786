"""Tables of runs side by side (`commtrace.analyses.comparison`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.formatting import format_small_share

from .shared_columns import OP, PER_RANK, ROLE, RUN
from .spec import TableSpec, bytes_column, column, count, text_column, word_column

COMPARISON_TABLES: Final = (
    TableSpec("runs", "Runs side by side", "A row per run, in the given order.", (
        RUN,
        text_column("path", "path", "Log directory."),
        word_column("id", "id", "Identifier of the run."),
        text_column("job", "job", 'What was trained; "" if it was not captured.'),
        count("ranks_seen", "ranks", "Ranks that left a log."),
        count("world_size", "world size", "Ranks of the job; missing if not known."),
        count("steps", "steps", "Training steps in the log."),
        *(replace(column, meaning=f"{column.meaning} Of a training step.") for column in PER_RANK),
        count("differing_steps", "", "Steps whose calls or payload are not the median ones."),
        column("fraction", format_small_share, "tracing_share", "tracing cost",
            "Share of the run's time that tracing cost, mean over the processes.", optional=True),
    ), {
        "terminal": (
            "run", "ranks_seen", "steps", "calls_per_rank", "payload_bytes_per_rank", "wire_bytes_per_rank",
            "tracing_share",
        ),
        "page": (
            "run", "job", "ranks_seen", "steps", "calls_per_rank", "payload_bytes_per_rank", "wire_bytes_per_rank",
            "tracing_share",
        ),
    }),
    TableSpec("runs_by_operation", "Operations of runs side by side", "A row per run, part and operation.", (
        RUN,
        word_column("part", "part", '"whole run", start-up included, or "training step".'),
        OP, *PER_RANK,
    )),
    TableSpec("runs_predicted", "Predicted and measured wire bytes", "A row per run.", (
        RUN,
        bytes_column("predicted_bytes", "predicted", "Wire bytes of a rank's step by the closed form."),
        bytes_column("measured_bytes", "measured", "Wire bytes of a rank's step in the log; missing if not predicted."),
    )),
    TableSpec("runs_by_role", "Parallel dimensions of runs side by side", "A row per run and dimension, whole runs.", (
        ROLE, RUN, *PER_RANK[1:],
    )),
    TableSpec("runs_predicted_by_role", "Predicted and measured wire bytes by parallel dimension",
        "A row per run and dimension that has a closed form.", (
        RUN, ROLE,
        text_column("form", "form", "The closed form."),
        bytes_column("predicted_bytes", "predicted",
            "Wire bytes of a step by the closed form: of one rank, but of a pipeline what all of its stages send."),
        bytes_column("measured_bytes", "measured", "Wire bytes of a step in the log, counted likewise."),
    )),
)  # fmt: skip
