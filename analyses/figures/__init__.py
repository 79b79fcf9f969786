"""Figures of runs. A figure is a function that draws one table with plotly.

A figure of one run:

    import commtrace
    run = commtrace.open("logs/run1")
    run.figure("message_sizes")                             # shown in Jupyter

    from commtrace.analyses import figures
    figures.message_sizes(run.table("message_size_bins"))   # from any table with the same columns

A figure of several runs:

    from commtrace.analyses.side_by_side import compare
    tables = compare({"ddp": run, "zero3": other})
    figures.operation_shares(tables["runs_by_operation"])

A figure of predictions:

    figures.gains(run.what_if())
    figures.step_timelines(run.step_timelines("compute=0.5x"))

`volumes`, `sizes`, `step_timeline`, `step_overlap`, `delays_and_paths` and `expected_and_recorded` draw one run,
`run_comparison` several, `predicted_steps` changed runs and layouts; `style` has colours, units and traces.

`FIGURES`, `COMPARISONS`, `SCALING` and `WHAT_IF` list all figures, with the table of each and what to look for in it.
To add a figure, add a function to a module of this package and an entry to `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd

from commtrace.errors import MissingLibraryError

try:
    import plotly.graph_objects as go
except ImportError:
    raise MissingLibraryError.of_extra("figures", "plotly", "html") from None

from .delays_and_paths import critical_path, delays
from .expected_and_recorded import differences, expected_and_measured, waterfall, waterfall_by_role
from .predicted_steps import exposed_by_bandwidth, exposed_by_speed, gains, layout_bounds, projection, step_timelines
from .run_comparison import (
    measured_and_predicted,
    operation_shares,
    operation_volumes,
    predicted_by_role,
    role_volumes,
    speedup,
    step_parts,
)
from .sizes import message_sizes, sizes_over_time
from .step_overlap import exposed_communication, of_steps
from .step_timeline import timeline
from .volumes import steps, volume

__all__ = [
    "COMPARISONS", "FIGURES", "SCALING", "WHAT_IF", "Figure", "critical_path", "delays", "expected_and_measured",
    "exposed_by_bandwidth", "exposed_by_speed", "exposed_communication", "gains", "layout_bounds",
    "measured_and_predicted", "message_sizes", "operation_shares", "operation_volumes", "predicted_by_role",
    "projection", "role_volumes", "sizes_over_time", "speedup", "step_parts", "step_timelines", "steps", "timeline",
    "volume", "waterfall", "waterfall_by_role",
]  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure that `draw` creates from one table of an analysis."""

    title: str
    table: str
    draw: Callable[[pd.DataFrame], go.Figure]
    look_for: str
    absent: str = "The log has no calls."
    """Why there is no figure, if the table is missing or has nothing to draw."""
    has_data: Callable[[pd.DataFrame], bool] = lambda table: len(table) > 0
    view: str = ""
    """View of the table that a page shows below the figure; "": none."""
    numbers: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table
    """Returns the rows of the table that the page shows."""
    numbers_title: str = "The numbers"


def _has_steps(table: pd.DataFrame) -> bool:
    return bool((table["step"] >= 0).any())


_NO_STEP: Final = (
    "The log has no training step: all calls belong to start-up or evaluations. Mark steps with commtrace.step()."
)
_NO_THEORY: Final = (
    "There is no prediction for this run: it would need a job captured in the log, and rules for its scheme. Compare "
    "with a dry run instead (commtrace check --against)."
)
_NO_STEP_TIMES: Final = (
    "The log does not have the times for this figure. It needs three training steps of every rank, with ends of calls "
    "observed on the host, and enough calls between hosts to compare their clocks."
)

FIGURES: Final[dict[str, Figure]] = {
    "volume": Figure("Volume by operation and parallel dimension", "volume_by_role_and_operation", volume,
        "The operation with the longest bar moves the most data. The thin grey bar shows the wire bytes: where it is "
        "longer, the operation sends more bytes than its buffers hold.", view="page",
        has_data=lambda table: bool(table["payload_bytes"].notna().any())),
    "waterfall": Figure("From the closed form to the recorded bytes", "waterfall", waterfall,
        "Each bar between the first and the last is a cause of this run sending more (or less) than the closed form "
        "predicts. A hatched bar has no known cause: look there.", _NO_THEORY, view="page"),
    "waterfall_by_role": Figure("From the closed form to the recorded bytes, by dimension", "waterfall_by_role",
        waterfall_by_role,
        "The closed form of each parallel dimension, and the bytes that the ranks send in it. A dimension without a "
        "closed form (the norm of all gradients, for example) begins at 0.",
        "The closed form of this run, if there is one, has a single dimension.", view="page"),
    "expected_and_measured": Figure("Expected and recorded, by operation", "reconciliation", expected_and_measured,
        "Pale bars: expected from the job's settings; solid bars: recorded. Bars of equal length agree; an operation "
        "used in place of another shows as two pairs that differ in opposite directions.", _NO_THEORY, _has_steps,
        view="page", numbers=differences, numbers_title="What differs, sums over ranks and training steps"),
    "message_sizes": Figure("Message sizes", "message_size_bins", message_sizes,
        "Above, how many calls have each size; below, how many bytes they move. Many small calls that move few "
        "bytes cost latency, and are candidates for merging.", view="page"),
    "steps": Figure("Volume and time of each step", "steps_by_operation", steps,
        "Steps with bars of equal height have equal payloads. A higher or lower bar is a step with other calls. If the "
        "time changes but the volume does not, the step waited for other ranks or for the machine. Calls that overlap "
        "are each counted in full.",
        _NO_STEP, _has_steps),
    "timeline": Figure("Timeline of one training step", "timeline", timeline,
        "An all_reduce, all_gather or reduce_scatter ends on all ranks together, so the rank with the shortest bar "
        "came last, and the others waited for it. (A bar is too long if the end was observed only by a later wait.) "
        "Drag to zoom in, double-click to zoom out.", _NO_STEP),
    "exposed_communication": Figure("Communication beside computation", "exposed_communication", exposed_communication,
        "Exposed communication is time in which a rank does nothing but communicate: what a faster network, or more "
        "overlap, can gain at most. Hidden communication costs no time of its own.",
        "The log has no steps of which it is known when ranks compute and communicate.",
        lambda table: len(of_steps(table)) > 0),
    "delays": Figure("Computation beyond that of the other ranks", "delay_by_rank_and_step", delays,
        "A bright row is a rank that is always late, a bright cell one that was late once, a bright column a step in "
        "which a few ranks had more to do. Waiting does not count, so a delay shows only where it began.",
        _NO_STEP_TIMES),
    "critical_path": Figure("Critical path of the slowest step", "critical_path", critical_path,
        "What the end of the step depended on: shortening a piece of the path shortens the step, shortening anything "
        "else does not. The path changes ranks where one waited for another.", _NO_STEP_TIMES),
    "sizes_over_time": Figure("Message sizes over time", "sizes_over_time", sizes_over_time,
        "Start-up is at the left. A row that continues to the right is a size that occurs during the whole training; a "
        "single cell is a size that occurs only at that time. Brighter cells have more calls."),
}  # fmt: skip
"""Figures of one run, in the order of the HTML report."""

COMPARISONS: Final[dict[str, Figure]] = {
    "operation_shares": Figure("Share of each operation", "runs_by_operation", operation_shares,
        "Each bar is one run, whatever its volume: the mix of operations shows the scheme. Start-up is included; its "
        "share shrinks in longer runs."),
    "operation_volumes": Figure("Volume of each operation", "runs_by_operation", operation_volumes,
        "Compare the lower bars: a training step of each run. The upper ones add start-up and grow with the number of "
        "steps.", view="page"),
    "measured_and_predicted": Figure("Recorded against the closed form", "runs_predicted", measured_and_predicted,
        "A run at 1.00 x sends what the closed form predicts. The report of a run explains other ratios.",
        "There is no prediction for any of these runs: it would need jobs captured in the logs.",
        lambda table: bool(table["predicted_bytes"].notna().any()), view="page"),
    "role_volumes": Figure("Volume of each parallel dimension", "runs_by_role", role_volumes,
        "What each parallel dimension sends in the whole run. Groups of a single rank send nothing and are left out.",
        has_data=lambda table: bool((table["wire_bytes_per_rank"] > 0).any())),
    "predicted_by_role": Figure("Recorded against the closed form, by dimension", "runs_predicted_by_role",
        predicted_by_role,
        "The closed forms are the equations of Anthony et al. (2024). Equation 4 counts all stages of a pipeline and "
        "one micro-batch, equations 2 and 5 one rank; recorded bytes are counted likewise. With several micro-batches "
        "per step, the recorded bytes are that many times the closed form.",
        "None of these runs has several parallel dimensions with closed forms."),
}  # fmt: skip
"""Figures of several runs, in the order of the HTML report."""

SCALING: Final[dict[str, Figure]] = {
    "speedup": Figure("Speedup and efficiency", "scaling", speedup,
        "The dotted line is ideal (linear) scaling. The further the solid line is below it, the lower the scaling "
        "efficiency.", view="speedup"),
    "step_parts": Figure("Where the time of a step goes", "scaling", step_parts,
        "With a fixed global batch, computation should shrink as ranks are added. What stays or grows limits the "
        "scaling.", view="step_parts"),
    "projection": Figure("The model, and more ranks", "scaling_projection", projection,
        "Points are measured. Where they lie on the top of the stack, the model holds; the colour that grows to the "
        "right limits the scaling.", view="model"),
}  # fmt: skip
"""Figures of runs on increasing numbers of ranks (`commtrace scaling`)."""

WHAT_IF: Final[dict[str, Figure]] = {
    "gains": Figure("What each change gains", "what_if", gains,
        "The longest bar is the change worth most. Thin lines are 90 % intervals: changes whose lines overlap may be "
        "worth the same.", has_data=lambda table: len(table) > 1),
    "step_timelines": Figure("A step before and after", "step_timelines", step_timelines,
        "Of each rank, computation above and transfers below. What lies above each other overlaps; gaps in the upper "
        "row are waits. The dotted line ends the step."),
    "exposed_by_speed": Figure("Exposed communication by the speed of transfers", "exposed_by_speed", exposed_by_speed,
        "The share of a step that would be saved if transfers took no time, by how much faster they are. Points are "
        "the recorded speed; dotted lines are 20, 10 and 5 %."),
    "exposed_by_bandwidth": Figure("Exposed communication by bandwidth", "exposed_by_bandwidth", exposed_by_bandwidth,
        "The share of a step that its transfers take, by the bandwidth of a rank: between all hidden that dependencies "
        "allow and nothing hidden. Dotted lines are 20, 10 and 5 %.", has_data=lambda table: len(table) > 0),
    "layout_bounds": Figure("Steps of layouts", "layouts", layout_bounds,
        "Bars that do not overlap have a certain order. A long bar says that it matters what the library hides."),
}  # fmt: skip
"""Figures of predictions (`commtrace whatif`)."""
