"""What runs measured, as text: one run by rank, runs by number of ranks, and what stops the scaling."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .outcome import Outcome, RankOutcome
from .stopwatch import COMMUNICATION, COPY_BACK, COPY_OUT, EXCLUSIVE

TOLERANCE: Final = {"float32": 1e-4, "float64": 1e-10}
"""Largest difference from one process, relative to the largest number of a tensor: sums in another order."""

ENOUGH: Final = 0.9
"""Share of the time in which a rank must have its core for its times to mean anything."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def tell(comm: Any, own: RankOutcome, workload: str, mode: str, options: Namespace, tokens: int) -> int:
    """The end of a run, of `tokens` an iteration: rank 0 shows what all ranks measured, and writes it with --json.

    The status of the command: see `print_run`; 0 on other ranks.
    """
    ranks = comm.gather(own)
    if ranks is None:
        return 0
    outcome = Outcome(workload, mode, vars(options), tokens, ranks)
    if options.json:
        outcome.write(options.json)
    return print_run(outcome)


def print_run(outcome: Outcome) -> int:
    """Show a run; 1 when it was checked and its results are not those of one process, else 0."""
    settings = outcome.settings
    print(f"{outcome.workload}, {outcome.mode}, {_ranks(len(outcome.ranks))}, {settings['transport']}:", end=" ")
    print(f"{outcome.slowest.seconds:.4f} s an iteration, {outcome.tokens / outcome.slowest.seconds:,.0f} tokens/s\n")
    print(_by_rank(outcome.ranks), end="\n\n")
    for warning in taken_cores([outcome]):
        print(warning)
    errors = [rank.error for rank in outcome.ranks if rank.error is not None]
    if not errors:
        return 0
    limit = TOLERANCE[settings["dtype"]]
    good = max(errors) <= limit
    print(f"largest difference from one process: {max(errors):.1e} of the tensor's largest number (limit {limit:.0e})")
    if not good:
        print(f"{outcome.workload}: error: the results are not those of one process", file=sys.stderr)
    return 0 if good else 1


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def _by_rank(ranks: Sequence[RankOutcome]) -> str:
    names = ("compute", *(name for name in EXCLUSIVE if any(name in rank.parts for rank in ranks)))
    ops = sorted({op for rank in ranks for op, _, _ in rank.traffic})
    rows = [
        [
            str(number),
            f"{rank.seconds:.4f}",
            *(f"{rank.parts.get(name, 0.0):.4f}" for name in names),
            *(_calls(rank, op) for op in ops),
        ]
        for number, rank in enumerate(ranks)
    ]
    return table(["rank", "iteration (s)", *(f"{name} (s)" for name in names), *ops], rows)


def _calls(rank: RankOutcome, op: str) -> str:
    found = [(payload, calls) for name, payload, calls in rank.traffic if name == op]
    return f"{sum(calls for _, calls in found)} x, {size(sum(p * calls for p, calls in found))}" if found else "-"


def size(number: float) -> str:
    """Bytes, in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"


def payload(rank: RankOutcome) -> int:
    """Bytes of an iteration's calls; a message is counted where it is sent."""
    return sum(size * calls for op, size, calls in rank.traffic if op != "recv")


def copies(outcome: Outcome) -> float:
    """Seconds of an iteration between device and host, mean over the ranks."""
    return outcome.mean(COPY_OUT) + outcome.mean(COPY_BACK)


def scaling(outcomes: Sequence[Outcome]) -> str:
    """The table of strong scaling: the same work on more ranks. The time is the slowest rank's, its parts are means."""
    first = outcomes[0]
    rows = []
    for one in outcomes:
        n, slowest = len(one.ranks), one.slowest
        rows.append(
            [
                str(n),
                f"{slowest.seconds:.4f}",
                *_ratios(n / len(first.ranks), first.slowest.seconds / slowest.seconds),
                f"{one.tokens / slowest.seconds:,.0f}",
                f"{one.mean('compute'):.4f}",
                f"{one.mean(COMMUNICATION):.4f}",
                f"{copies(one):.4f}",
                size(max(payload(rank) for rank in one.ranks)),
            ]
        )
    head = ["ranks", "time (s)", "speedup", "efficiency", "tokens/s"]
    return table([*head, "compute (s)", "communication (s)", "copies (s)", "payload a rank"], rows)


def _ratios(more: float, speedup: float) -> tuple[str, str]:
    return f"{speedup:.2f}x", f"{speedup / more:.0%}"


def sublayers(outcomes: Sequence[Outcome], names: Sequence[str]) -> str:
    """Speedups of the forward pass by part, where the workload marks parts."""
    known = [name for name in names if all(one.mean(name) for one in outcomes)]
    if not known:
        return ""
    rows = [
        [str(len(one.ranks)), *(f"{outcomes[0].mean(name) / one.mean(name):.2f}x" for name in known)]
        for one in outcomes
    ]
    return table(["ranks", *known], rows)


def taken_cores(outcomes: Iterable[Outcome]) -> list[str]:
    """A warning for each run whose ranks shared cores, with each other or with other programs."""
    found = []
    for one in outcomes:
        if one.oversubscribed is not None:
            ranks, cores = one.oversubscribed
            found.append(
                f"{ranks} ranks on one host share {_cores(cores)}: they take turns in computing, and a rank whose turn "
                "it is not keeps the others waiting. Their times say nothing of the network."
            )
        elif one.had_cores < ENOUGH:
            found.append(
                f"{_ranks(len(one.ranks))} had a core {one.had_cores:.0%} of the time only: other programs ran on this "
                "machine. Measure again on a quiet one."
            )
    return found


def losses_to(outcomes: Sequence[Outcome]) -> list[str]:
    """For each number of ranks, a sentence: where the time beyond a perfect division went."""
    first = outcomes[0]
    return [_loss(first, one) for one in outcomes[1:]]


def _loss(first: Outcome, one: Outcome) -> str:
    n = len(one.ranks)
    share = len(first.ranks) / n
    beyond = {name: one.mean(name) - share * first.mean(name) for name in ("compute", *EXCLUSIVE)}
    lost = sum(beyond.values())
    if lost <= 0:
        return f"{n} ranks: {-lost:.4f} s faster than a perfect division of the work."
    words = {"compute": "computation that did not shrink with the ranks", COMMUNICATION: "communication and waiting"}
    named = sorted(((seconds, words.get(name, name)) for name, seconds in beyond.items() if seconds > 0), reverse=True)
    parts = ", ".join(f"{seconds:.4f} s {name}" for seconds, name in named)
    communicated = one.mean(COMMUNICATION) + copies(one)
    return (
        f"{n} ranks: {lost:.4f} s over a perfect division of the work: {parts}. Communication and copies are "
        f"{communicated / (communicated + one.mean('compute')):.0%} of the iteration."
    )


def growth(outcomes: Sequence[Outcome]) -> str:
    """A sentence: how the payload of a rank grows with their number."""
    found = [(len(one.ranks), max(payload(rank) for rank in one.ranks)) for one in outcomes]
    sent = [(n, amount) for n, amount in found if amount]
    if len(sent) < 2:
        return ""
    (few, before), (many, after) = sent[0], sent[-1]
    change = f"stays at {size(after)}" if before == after else f"goes from {size(before)} to {size(after)}"
    return (
        f"From {few} to {many} ranks a rank's payload an iteration {change}, while its share of the work falls by a "
        f"factor of {many / few:.3g}: communication per computation grows {after / before * many / few:.3g} times."
    )
