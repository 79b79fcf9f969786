"""Dry runs of several layouts compared: `commtrace.compare_layouts`, and what `commtrace whatif DRYRUN ...` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.errors import CommtraceError

from .layouts import (
    LAYOUTS,
    Rate,
    networks_of,
    predicted_layouts,
    rate_of_computation,
    rate_of_run,
    sentences,
)
from .predictions import REMARKS, replayed_run
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
    if sum(value is not None for value in (rate, computation_s, calibrate)) != 1:
        raise CommtraceError("layouts: state how fast ranks compute, by one of rate, computation_s and calibrate")
    if not runs:
        raise CommtraceError("layouts: no dry run is given")
    networks = networks_of([network] if isinstance(network, str) else network)
    steps = {name: simulated_step(run) for name, run in runs.items()}
    if calibrate is not None:
        speed = rate_of_run(replayed_run(calibrate), [*steps.values()])
    elif rate is not None:
        if not rate > 0:
            raise CommtraceError(f"layouts: a rate of {rate:g} operations by second; it must be above 0")
        speed = Rate(rate, "as stated")
    else:
        if not (computation_s or 0) > 0:
            raise CommtraceError(f"layouts: a computation of {computation_s:g} s; it must be above 0")
        speed = rate_of_computation(next(iter(steps.values())), float(computation_s or 0))
    tables = predicted_layouts(steps, networks, speed)
    tables[LAYOUTS.name].attrs[REMARKS] = [*sentences(tables, networks, speed)]
    return tables
