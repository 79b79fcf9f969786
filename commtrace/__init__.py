"""commtrace records the communication calls of a distributed training program and explains them.

The program needs no changes; an environment variable switches recording on:

    COMMTRACE=logs/run1 torchrun --nproc-per-node 2 train.py
    commtrace report logs/run1

In Python and Jupyter:

    import commtrace
    run = commtrace.open("logs/run1")
    run.events()                        # a pandas DataFrame, one row per call
    run.table("volume_by_operation")    # any table of the report

A program may mark what commtrace cannot detect: `commtrace.step()` where a training step begins, and
`with commtrace.phase("forward"):` around a phase of it. Both do nothing while tracing is off.

Shared modules, beside the folders that docs/explanation/architecture.md lists:

    run, cli                    the public interface, and the command line
    startup, hook_table, patching, settings     switching tracing on
    schema                      the record of a call, its phases and purposes, the columns of the event table
    operations, volume          what is known of each operation; bytes
    current_step, identity, launchers           step, rank and launcher of this process
    library_frames, reduce_ops  frames that are no call sites; the reduction of a running call
    job_row, job_facts          the captured training job
    durations, summary_format   times from records; files of the summary mode
    rank_ranges, formatting, text_tables, statements    ranks, numbers, tables and notes as text
    output_files, errors        files that appear complete; errors and warnings
"""

from __future__ import annotations

from importlib import import_module

from commtrace.errors import CommtraceError

TYPE_CHECKING = False  # importing typing takes a millisecond or two in every process
if TYPE_CHECKING:
    from commtrace.analyses.scaling import scaling
    from commtrace.analyses.side_by_side import compare
    from commtrace.analyses.what_if.layout_comparison import compare_layouts
    from commtrace.current_step import phase, step
    from commtrace.run import Run
    from commtrace.run import open_run as open
    from commtrace.startup import start, stop

__version__ = "0.1.0"
__all__ = [
    "CommtraceError", "Run", "compare", "compare_layouts", "open", "phase", "scaling", "start", "step", "stop",
]  # fmt: skip

# Name -> module and attribute to import on first use, so that training processes do not import pandas.
_ON_FIRST_USE = {
    "Run": ("run", "Run"), "open": ("run", "open_run"), "compare": ("analyses.side_by_side", "compare"),
    "compare_layouts": ("analyses.what_if.layout_comparison", "compare_layouts"),
    "scaling": ("analyses.scaling", "scaling"), "start": ("startup", "start"), "stop": ("startup", "stop"),
    "step": ("current_step", "step"), "phase": ("current_step", "phase"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'commtrace' has no attribute {name!r}")
    module, attribute = _ON_FIRST_USE[name]
    value = globals()[name] = getattr(import_module(f"commtrace.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
