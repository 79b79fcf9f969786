"""Command line: `commtrace COMMAND ...`. Only the module of that command is imported.

A command is a module of `commtrace.commands`: its docstring is its help, `prepare(parser)` adds its arguments,
`run(arguments)` does the work and returns the exit status, or raises CommtraceError, which this module prints, with
what to fix. `commtrace.commands.exit_status` has the statuses.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Final

import commtrace
from commtrace.commands.exit_status import FAILED, INTERRUPTED, PIPE_CLOSED
from commtrace.errors import CommtraceError
from commtrace.output_files import discard_stdout

# Command, also the name of its module in commtrace.commands -> first line of the module's docstring.
COMMANDS: Final = {
    "report": "Show what a run communicated.",
    "top": "Show a run while it is recorded.",
    "watch": "Watch a run while it is recorded, and tell of hangs, failures and delays.",
    "metrics": "Write the numbers of a run for TensorBoard or Prometheus.",
    "scaling": "Compare runs at increasing scale, and show what limits the scaling.",
    "whatif": "Predict the step time of a recorded run after a change, or of dry runs.",
    "check": "Compare a run with its expected calls, for continuous integration.",
    "diff": "Compare the calls of two runs.",
    "theory": "Predict what a training run will communicate, from its configuration alone.",
    "bench": "Measure collectives and messages, like nccl-tests and the OSU benchmarks.",
    "run": "Run a program with tracing on.",
    "dryrun": "Simulate any rank of a training job of any world size on this machine.",
    "doctor": "Show which libraries can be traced, and test recording on two local ranks.",
    "build": "Build the native recorder for this environment.",
    "recover": "Recover records of killed processes from this host's shared memory.",
    "pack": "Write a log as a Parquet data set for commtrace and other programs.",
    "import": "Import what other tools have recorded, as a log that every command reads.",
    "export": "Write every call of a run to a file for other tools.",
}


_EPILOG: Final = """\
record and report:
  COMMTRACE=logs/run1 torchrun --nproc-per-node 2 train.py
  commtrace report logs/run1

Run "commtrace COMMAND --help" for help on a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names (default: sys.argv[1:]), and return the exit status."""
    arguments = sys.argv[1:] if argv is None else [*argv]
    if isinstance(sys.stdout, TextIOWrapper):
        # A non-ASCII file name must not make a report fail on an ASCII terminal.
        sys.stdout.reconfigure(errors="replace")
        if sys.stdout is sys.__stdout__:
            # With PYTHONUNBUFFERED, too, a short verdict is written when its status is known.
            sys.stdout.reconfigure(write_through=False)
    status = PIPE_CLOSED
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except CommtraceError as error:
        print(f"commtrace: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:  # stdout on a full disk, for example
        discard_stdout()
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
            return status
        print(f"commtrace: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # Python's own status would be 1, that of a difference
        traceback.print_exc()
        return FAILED


def _run(arguments: list[str]) -> int:
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    parser = argparse.ArgumentParser(
        prog="commtrace",
        description="Record and analyse the communication of distributed training programs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commtrace {commtrace.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    program: list[str] = []
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            command = import_module(f"commtrace.commands.{name}")
            sub.description = inspect.getdoc(command)
            command.prepare(sub)
            sub.set_defaults(run=command.run)
            if sub.get_default("program") is not None and "--" in arguments:
                # argparse would take the program, which follows "--", for arguments of the command.
                at = arguments.index("--")
                arguments, program = arguments[:at], arguments[at + 1 :]
    parsed = parser.parse_args(arguments)
    parsed.program = program
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
