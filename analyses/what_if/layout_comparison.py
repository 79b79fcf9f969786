"""Dry runs of several layouts compared: `commtrace.compare_layouts`, and what `commtrace whatif DRYRUN ...` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.errors import CommtraceError

from .changed_run import REMARKS
from .layouts import LAYOUTS, networks_of, predicted_layouts, sentences, stated_rate
from .simulated_step import simulated_step


def compare_layouts(
    runs: Mapping[str, AnalysedRun],
    network: str | Sequence[str],
    *,
    rate: float | None = None,
    computation_s: float | None = None,
    calibrate: AnalysedRun | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the steps of dry runs on a network, as `commtrace whatif` shows them.

    Example:
        runs = {"zero1": commtrace.open("logs/zero1"), "tp8": commtrace.open("logs/tp8")}
        commtrace.compare_layouts(runs, "ndr-infiniband", rate=400e12)["layouts"]

    Args:
        runs: The dry runs by name.
        network: A network, as `--network` takes it, or several: one of all dimensions, others such as
            "tensor:450GB/s+2us".
        rate: Floating-point operations by second that a rank reaches.
        computation_s: Instead: seconds for which a rank of the first dry run computes in a step.
        calibrate: Instead: a recorded run of the layout of one of the dry runs, whose rate is measured.

    Returns:
        The tables `layouts` and `layout_transfers`; `attrs["remarks"]` of the first has sentences on what the
        predictions assume, and which order is certain.

    Raises:
        CommtraceError: A run is no dry run, the network is unknown, or not exactly one of the speeds is given.
    """
    if not runs:
        raise CommtraceError("dry runs: none is given")
    networks = networks_of([network] if isinstance(network, str) else network)
    steps = {name: simulated_step(run) for name, run in runs.items()}
    speed = stated_rate([*steps.values()], rate, computation_s, calibrate)
    tables = predicted_layouts(steps, networks, speed)
    tables[LAYOUTS.name].attrs[REMARKS] = [*sentences(tables, networks, speed)]
    return tables
