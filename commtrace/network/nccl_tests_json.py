"""JSON files of nccl-tests (`all_reduce_perf -J results.json`), as the lines of the table that it prints.

    {"version": 3, "start_time": "...", "args": ["./all_reduce_perf", ...], "env": [...], "nccl_version": 23004,
     "config": {"iterations": 20, ..., "devices": [{"rank": 0, "group": 0, "hostname": "node1", "device_info": ...}]},
     "results": [{"size": 8, "type": "float", "redop": "sum", "root": "    -1",
                  "out_of_place": {"time": 28.1, "alg_bw": 0.0, "bus_bw": 0.0, "nwrong": 0.0}, ...}]}

The file has the whole environment of its process: nothing of it is kept. Source: NVIDIA/nccl-tests, src/util.cu.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from . import NetworkError

_BEGIN: Final = re.compile(r'\s*\{\s*"version":\s*\d+,\s*"start_time":')


def is_nccl_tests_json(text: str) -> bool:
    """Return whether a text begins as such a file does."""
    return _BEGIN.match(text) is not None


def table_lines(path: Path, text: str) -> Iterator[str]:
    """Yield the lines of the table that nccl-tests prints with the results of a file. Raises NetworkError."""
    try:
        file = json.loads(text)
        yield f"# Collective test starting: {PurePosixPath(str(file['args'][0])).name}"
        yield f"# nThread iters: {int(file['config']['iterations'])}"
        version = int(file["nccl_version"])
        yield f"NCCL version {version // 10_000}.{version // 100 % 100}.{version % 100}"
        for device in file["config"]["devices"]:
            of_group = f"Rank {int(device['rank'])} Group {int(device['group'])}"
            yield f"#  {of_group} Pid 0 on {device['hostname']} device [] {device['device_info']}"
        yield "# size count type redop root time algbw busbw #wrong"
        for result in file["results"]:
            if (measured := result["out_of_place"]) is not None:
                yield _row(result, measured)
    except json.JSONDecodeError as error:
        raise NetworkError(
            f"{path}: line {error.lineno:,}: no JSON ({error.msg}); measure again, to the end"
        ) from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NetworkError(
            f"{path}: not as nccl-tests writes its results with -J ({type(error).__name__}: {error}); "
            "save what it prints instead"
        ) from error


def _row(result: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    if "cpu_time" in measured:
        raise ValueError("times of the host, of option -C")
    numbers = (float(measured[name]) for name in ("time", "alg_bw", "bus_bw"))
    wrong = "N/A" if measured["nwrong"] is None else int(measured["nwrong"])
    labels = (str(result[name]).strip() or "-" for name in ("type", "redop", "root"))
    return " ".join(map(str, (int(result["size"]), int(result["count"]), *labels, *numbers, wrong)))
