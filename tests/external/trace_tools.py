"""python trace_tools.py TRACES: what HTA and TraceLens count in a folder of traces, as JSON on the last line of stdout.

Runs in an environment of its own, with HolisticTraceAnalysis and TraceLens (github.com/AMD-AGI/TraceLens).
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"


def hta(folder: Path) -> dict[str, Any]:
    """Return name, rank, step and duration of each kernel, and the results of HTA's analyses."""
    analyzer = import_module("hta.trace_analysis").TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
    names = analyzer.t.symbol_table.get_sym_table()
    kernels = [
        [names[row.name], int(rank), int(row.iteration), round(row.dur * 1000)]
        for rank, frame in analyzer.t.traces.items()
        for row in frame[frame["stream"] > 0].itertuples()
    ]
    _, breakdown = analyzer.get_gpu_kernel_breakdown(visualize=False)
    overlap = analyzer.get_comm_comp_overlap(visualize=False)
    return {
        "kernels": kernels,
        "breakdown_ns": round(breakdown["sum (us)"].sum() * 1000),
        "overlap_percent": dict(zip(map(str, overlap["rank"]), overlap["comp_comm_overlap_pctg"], strict=True)),
    }


def tracelens(folder: Path) -> list[list[Any]]:
    """Return collective, rank, bytes of input and output, and duration of each call."""
    analyser = import_module("TraceLens.NcclAnalyser.nccl_analyser").NcclAnalyser
    count = len([*folder.glob("rank*.json.gz")])
    table = analyser([str(folder / f"rank{rank}.json.gz") for rank in range(count)], count).build_df_long()
    sizes = (table[f"{name} msg size (MB)"].fillna(0) * 2**20 for name in ("In", "Out"))
    columns = (table["Collective name"], table["rank"], *sizes, table["dur"] * 1000)
    return [
        [name, int(rank), round(sent), round(received), round(ns)]
        for name, rank, sent, received, ns in zip(*columns, strict=True)
    ]


if __name__ == "__main__":
    traces = Path(sys.argv[1])
    print("\n" + json.dumps({"hta": hta(traces), "tracelens": tracelens(traces)}))
