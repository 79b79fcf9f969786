"""Types of options, and the options that several commands share.

A type converts the text of an option to its value. For an invalid text it raises argparse.ArgumentTypeError; argparse
then prints the message after the name of the option, and exits with status 2.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, TypeVar

from commtrace.rank_ranges import parse_ranks

Value = TypeVar("Value", int, float, Fraction)

LOOPBACK: Final = "127.0.0.1"
"""Address that other hosts cannot reach."""
_LEAST_TOKEN: Final = 16


def _number_type(
    parse: Callable[[str], Value], minimum: float, description: str, below: float = math.inf
) -> Callable[[str], Value]:
    """Return a type for numbers of at least `minimum` and less than `below`; errors show `description`."""

    def option_type(text: str) -> Value:
        try:
            number = parse(text)
        except (ValueError, ZeroDivisionError):
            number = parse("-1")
        if not minimum <= number < below:
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return number

    return option_type


def _parse_integer(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]] if match else -1


positive_integer = _number_type(_parse_integer, 1, "a whole number of at least 1")
non_negative_integer = _number_type(_parse_integer, 0, "a whole number of at least 0")
positive_number = _number_type(float, math.ulp(0.0), "a number above 0", below=1e9)
exact_fraction = _number_type(Fraction, 0, "a number of at least 0, such as 0.01")
"""Option type: a non-negative fraction, without the rounding of float."""
payload_bytes = _number_type(_parse_bytes, 4, "a number of bytes of at least 4, such as 4, 64k or 1m")
"""Option type: a payload of at least one 4-byte element; the units are powers of 1024."""


def positive_integers(text: str) -> tuple[int, ...]:
    """Parse positive integers, separated by commas: "2,4,8"."""
    return tuple(map(positive_integer, text.split(",")))


def percentage(text: str) -> Fraction:
    """Parse a share of 0 to 100 %, such as "20%", as an exact fraction."""
    try:
        share = Fraction(text.removesuffix("%")) / 100
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not text.endswith("%") or not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 20%, from 0% to 100%")
    return share


def operation_percentage(text: str) -> tuple[str, Fraction]:
    """Parse an operation with a share, such as "reduce_scatter:60%"."""
    from commtrace.operations import OPERATIONS

    operation, _, share = text.partition(":")
    if operation not in OPERATIONS:
        raise argparse.ArgumentTypeError(f"{operation!r} is not an operation; choose from {', '.join(OPERATIONS)}")
    return operation, percentage(share)


def duration_seconds(text: str) -> float:
    """Parse a duration with its unit, such as "250ms", in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 250ms; units are us, ms and s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def flops_per_second(text: str) -> float:
    """Parse a rate such as "400TFLOPS", in floating-point operations by second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(G|T|P)FLOP(?:S|/s)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 400TFLOPS; units are GFLOPS, TFLOPS, PFLOPS")
    return float(match[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[match[2]]


def numbers_and_ranges(text: str) -> list[int]:
    """Parse integers and ranges, separated by commas: "0-15,64"."""
    try:
        numbers = parse_ranks(text)
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers and ranges, such as 0-15,64")
    return numbers


def steps(text: str) -> list[int]:
    """Parse training steps like `numbers_and_ranges`; the item "start-up" is allowed and becomes -1."""
    items = text.split(",")
    numbers = ",".join(item for item in items if item != "start-up")
    return [-1] * ("start-up" in items) + (numbers_and_ranges(numbers) if numbers else [])


def text_width(text: str) -> int:
    """Parse an output width in characters; "auto" is the width of the terminal."""
    from commtrace.text_tables import MIN_WIDTH, terminal_width

    if text == "auto":
        return terminal_width()
    if not text.isdigit() or int(text) < MIN_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number of at least {MIN_WIDTH}")
    return int(text)


_SHARED: Final[dict[str, dict[str, Any]]] = {
    "directory": {
        "metavar": "DIR", "type": Path, "help": "log directory, as in COMMTRACE, or one run's directory in it",
    },
    "--json": {"action": "store_true", "help": "print all tables with exact numbers as one JSON document"},
    "--html": {"metavar": "FILE", "type": Path, "help": "write one self-contained HTML page with figures"},
    "--force": {"action": "store_true", "help": "replace FILE if it exists"},
    "--width": {
        "metavar": "N", "type": text_width, "default": "auto",
        "help": "output width in characters (default: the terminal's)",
    },
    "--per-rank": {
        "action": "store_true", "help": "show every rank (default: above 32 ranks, equivalent ranks share a row)",
    },
    "--world-size": {
        "metavar": "N", "type": positive_integer, "required": True, "help": "number of ranks of the job",
    },
    "--own": {
        "metavar": "PATTERN", "action": "append", "default": [],
        "help": "do not compare calls whose call site (file name and function name) contains PATTERN, such as train.py "
        "or log_loss; `*` and `?` are wildcards; calls in the backward pass never match; may be repeated",
    },
    "--dask": {
        "metavar": "SCHEDULER",
        "help": "use the workers of a Dask cluster: the scheduler's address or file, or local[:N]",
    },
    "--network": {
        "metavar": "NET",
        "help": ": a results file written by commtrace bench, the output of nccl-tests or the OSU micro-benchmarks "
        "(a file or a directory), a network description, the name of a built-in description (slingshot-11, "
        "ndr-infiniband), or a rank's bandwidth and latency, such as 100GB/s+5us",
    },
}  # fmt: skip
"""Arguments that have the same meaning in several commands."""


def add_shared(parser: argparse._ActionsContainer, *names: str, purpose: str = "") -> None:
    """Add arguments that several commands share, by name; `purpose` is the beginning of the help."""
    for name in names:
        parser.add_argument(name, **{**_SHARED[name], "help": purpose + _SHARED[name]["help"]})


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add --json, --html and --force: output other than text."""
    add_shared(parser.add_mutually_exclusive_group(), "--json", "--html")
    add_shared(parser, "--force")


def add_timeout(parser: argparse.ArgumentParser, seconds: int, help_text: str) -> None:
    """Add --timeout."""
    parser.add_argument("--timeout", metavar="SECONDS", type=positive_number, default=float(seconds),
        help=f"{help_text} (default: {seconds})")  # fmt: skip


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add CMD, the program to run and its arguments, which may follow "--". Call this last: it fixes the usage."""
    usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
    parser.usage = f"{usage} [--] CMD ..."
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="program and its arguments")


def add_serving(parser: argparse.ArgumentParser, token_help: str) -> None:
    """Add --address and --token."""
    parser.add_argument("--address", metavar="ADDRESS", default=LOOPBACK,
        help=f"address to serve at (default: {LOOPBACK}, which other hosts cannot reach)")  # fmt: skip
    parser.add_argument(
        "--token", metavar="TOKEN", type=access_token, help=f"{token_help}; @FILE: the contents of a file"
    )


def port_number(text: str) -> int:
    """Parse a port."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def access_token(text: str) -> str:
    """Parse a token, or @ and the name of a file with one: other users of the host see a command's arguments."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(errors="replace").strip()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text[1:]}: {error.strerror}") from None
    if not re.fullmatch(rf"[\w.~-]{{{_LEAST_TOKEN},}}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"a token has at least {_LEAST_TOKEN} characters of A-Z a-z 0-9 . _ ~ -")
    return text
