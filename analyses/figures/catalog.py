"""The figures by name: what they are drawn from, and what to look for in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from .reconciliation import expected_and_measured, waterfall, waterfall_by_role
from .run_comparison import measured_and_predicted, operation_shares, operation_volumes, predicted_by_role, role_volumes
from .scaling import speedup, step_parts
from .sizes import message_sizes, sizes_over_time
from .step_timeline import timeline
from .step_volumes import steps
from .volumes import volume


@dataclass(frozen=True)
class Figure:
    """A figure: `draw(table)` makes it of one table of an analysis."""

    title: str
    table: str
    draw: Callable[[pd.DataFrame], go.Figure]
    look_for: str
    absent: str
    """Why there is none, where the table is missing or says nothing."""
    says: Callable[[pd.DataFrame], bool] = lambda table: len(table) > 0

    def can(self, table: pd.DataFrame | None) -> bool:
        """Whether there is something to draw."""
        return table is not None and self.says(table)


def _has_steps(table: pd.DataFrame) -> bool:
    return bool((table["step"] >= 0).any())


_NO_CALL: Final = "The log holds no call."
_NO_STEP: Final = "No training step was seen in this log: everything counts as start-up."
_NO_THEORY: Final = (
    "There is no prediction for this run: it needs the job that is trained, captured in the log, and rules for its "
    "scheme."
)

# In the order of a page.
FIGURES: Final[dict[str, Figure]] = {
    "volume": Figure(
        "Volume by operation and parallel dimension",
        "volume_by_role_and_operation",
        volume,
        "The longest bar is where most data is moved. The thin grey bar is what the ranks must at least send for "
        "it: where it is the longer one, the operation costs more on the wire than its buffers are large.",
        _NO_CALL,
    ),
    "waterfall": Figure(
        "From the closed form to what was measured",
        "waterfall",
        waterfall,
        "Each bar between the first and the last is one cause for which this run sends more (or less) than the "
        "textbook says. A hatched bar is what nobody has explained yet: that is where to look.",
        _NO_THEORY,
    ),
    "waterfall_by_role": Figure(
        "The same, dimension by dimension",
        "waterfall_by_role",
        waterfall_by_role,
        "A formula of its own for each way in which the job is divided, and what its ranks really send for it. A "
        "dimension without a formula (the norm of the whole model's gradients, say) begins at nothing.",
        "The closed form of this run, if it has one, is of one dimension.",
    ),
    "expected_and_measured": Figure(
        "Expected and measured, by operation",
        "reconciliation",
        expected_and_measured,
        "Pale is what the job's settings let one expect, full is what was measured. Pairs of one length are "
        "understood; an operation in place of another shows as two pairs that differ in opposite directions.",
        _NO_THEORY,
        _has_steps,
    ),
    "message_sizes": Figure(
        "Message sizes",
        "message_size_bins",
        message_sizes,
        "Above, how many calls have each size; below, how many bytes they move. Many calls on the left that carry no "
        "bytes below cost latency, and are candidates for being merged.",
        _NO_CALL,
    ),
    "steps": Figure(
        "Volume and time of each step",
        "steps_by_operation",
        steps,
        "Bars of one height mean that steps are alike; one that stands out did something else. Time that moves while "
        "the volume does not is waiting, for other ranks or for the machine. Calls that overlap are each counted in "
        "full.",
        _NO_STEP,
        _has_steps,
    ),
    "timeline": Figure(
        "One training step, as it went",
        "timeline",
        timeline,
        "An all_reduce, all_gather or reduce_scatter ends on all ranks together, so the rank whose bar is shortest "
        "came last, and the others waited for it. (An end that only a late wait saw makes a bar too long.) Drag to "
        "look closer, double-click to come back.",
        _NO_STEP,
    ),
    "sizes_over_time": Figure(
        "Message sizes over time",
        "sizes_over_time",
        sizes_over_time,
        "Start-up is at the left. A row that goes on to the right is a message of every step; a cell on its own is "
        "something that happened once. Brighter is more calls.",
        _NO_CALL,
    ),
}

# Of runs side by side, in the order of a page.
COMPARISONS: Final[dict[str, Figure]] = {
    "operation_shares": Figure(
        "Share of each operation",
        "runs_by_operation",
        operation_shares,
        "Each bar is one run, whatever it moved: a scheme shows by which operations it is made of. Start-up counts, "
        "and weighs the less the longer a run is.",
        _NO_CALL,
    ),
    "operation_volumes": Figure(
        "Volume of each operation",
        "runs_by_operation",
        operation_volumes,
        "Compare the lower bars: a training step of each run. The upper ones add start-up and grow with the number of "
        "steps.",
        _NO_CALL,
    ),
    "measured_and_predicted": Figure(
        "Measured against predicted",
        "runs_predicted",
        measured_and_predicted,
        "1.00 x is a run that does what the closed form says. Its own page says why another does not.",
        "There is no prediction for any of these runs: it needs the jobs that are trained, captured in the logs.",
        lambda table: bool(table["predicted_bytes"].notna().any()),
    ),
    "role_volumes": Figure(
        "Volume of each parallel dimension",
        "runs_by_role",
        role_volumes,
        "What each way of dividing a model costs on the wire, whole runs side by side. What a rank sends to itself "
        "alone (a group of one) is not there.",
        _NO_CALL,
        lambda table: bool((table["wire_bytes_per_rank"] > 0).any()),
    ),
    "predicted_by_role": Figure(
        "Measured against predicted, by dimension",
        "runs_predicted_by_role",
        predicted_by_role,
        "Equation 4 is of all stages of a pipeline and one micro-batch, equations 2 and 5 of one rank: measured is "
        "counted likewise. Several micro-batches a step show as so many times what is predicted.",
        "None of these runs is divided in several ways that have formulas.",
    ),
}

SCALING: Final[dict[str, Figure]] = {
    "speedup": Figure(
        "Speedup and efficiency",
        "scaling",
        speedup,
        "The dotted line is a perfect division of the work. Where the full line leaves it, more ranks cost more "
        "than they bring.",
        _NO_CALL,
    ),
    "step_parts": Figure(
        "Where the time of a step goes",
        "scaling",
        step_parts,
        "Computing should shrink as ranks are added. What stays, or grows, is what stops the scaling.",
        _NO_CALL,
    ),
}
"""Of runs on more and more ranks (`commtrace scaling`)."""
