"""Types of options, and the options that several commands share.

A type turns the text of an option into its value. For any other text it raises argparse.ArgumentTypeError: argparse
prints the message after the name of the option, and ends with status 2.
"""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import Final

_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30}


def positive_integer(text: str) -> int:
    """Parse a whole number from 1."""
    return non_negative_integer(text, minimum=1)


def non_negative_integer(text: str, minimum: int = 0) -> int:
    """Parse a whole number from `minimum`."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum}")
    return int(text)


def positive_integers(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1, separated by commas: "2,4,8"."""
    return tuple(positive_integer(item) for item in text.split(","))


def positive_number(text: str) -> float:
    """Parse a number above 0 and below a billion."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def exact_fraction(text: str) -> Fraction:
    """Parse a number from 0, exactly as its decimal digits: "0.01"."""
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(-1)
    if fraction < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, such as 0.01")
    return fraction


def payload_bytes(text: str) -> int:
    """Parse a payload of at least one 4-byte element: "4", "64k", "1m"; the units are powers of 1024."""
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    number = int(match[1]) << _UNITS[match[2]] if match else 0
    if number < 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes from 4, such as 4, 64k or 1m")
    return number


def text_width(text: str) -> int:
    """Parse an output width in characters; "auto" is the terminal's."""
    from commtrace.text_tables import MIN_WIDTH, terminal_width

    if text == "auto":
        return terminal_width()
    if not text.isdigit() or int(text) < MIN_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number from {MIN_WIDTH}")
    return int(text)


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    """Add DIR, the log to read."""
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="log directory, as in COMMTRACE, or the folder of one run in it"
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print all tables with exact numbers as one JSON document")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add --json, --html and --force: output other than text."""
    group = parser.add_mutually_exclusive_group()
    add_json(group)
    group.add_argument("--html", metavar="FILE", type=Path, help="write one self-contained HTML page with figures")
    add_force(parser)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add --force."""
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def add_width(parser: argparse.ArgumentParser) -> None:
    """Add --width."""
    parser.add_argument(
        "--width", metavar="N", type=text_width, default="auto",
        help="output width in characters (default: the terminal's)",
    )  # fmt: skip


def add_own(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add --own."""
    parser.add_argument(
        "--own", metavar="PATTERN", action="append", default=[],
        help=f"{help_text}: a part of file and function, such as train.py or log_loss; may be repeated",
    )  # fmt: skip


def add_timeout(parser: argparse.ArgumentParser, seconds: int, help_text: str) -> None:
    """Add --timeout."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive_number, default=float(seconds),
        help=f"{help_text} (default: {seconds})",
    )  # fmt: skip


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add CMD, the program to run and its arguments, which may follow "--". Add it last: the usage is fixed then."""
    usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
    parser.usage = f"{usage} [--] CMD ..."
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="program and its arguments")


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """Add --world-size."""
    parser.add_argument(
        "--world-size", metavar="N", type=positive_integer, required=True, help="number of ranks of the job"
    )


def add_network(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add --network."""
    parser.add_argument(
        "--network",
        metavar="NET",
        help=f"{help_text}: a file of commtrace bench, a network description, or the name of a built-in description "
        "(slingshot-11, ndr-infiniband)",
    )
