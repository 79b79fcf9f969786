"""Training runs that are timed: GPT-NeoX's schemes with small models on real ranks, each point several times.

A point is one training run of a few steps. All have the same number of sequences in a micro-batch (one), as in the
paper, so that a longer sequence is more work. Ranks compute in fp32 with one thread each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from commtrace.errors import CommtraceError

STEPS: Final = 7
"""Steps of a run. The first is measured separately, the last has no end, the others count."""
REPEATS: Final = 3
LAYERS: Final = 4
HEADS: Final = 8
VOCABULARY: Final = 256
HIDDEN, LARGER_HIDDEN = 256, 512
LENGTHS: Final = (128, 256, 512, 1024)
"""Sequence lengths, doubling as in the paper (512 to 4096)."""
LENGTH: Final = 256
"""Sequence length at which schemes and models are compared."""
MICRO_BATCHES: Final = 4
"""Micro-batches of a pipeline's step; other schemes have one."""


@dataclass(frozen=True)
class Scheme:
    """A way to divide a training over ranks."""

    name: str
    options: Sequence[str]
    """Options of the training program."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """GPT-NeoX's keys."""
    model_ranks: int = 1
    """Ranks that share one copy of the model; others are data-parallel."""
    micro_batches: int = 1

    @property
    def key(self) -> str:
        """Name of the scheme in folder names."""
        return self.name.lower().replace(" ", "-")


DDP: Final = Scheme("DDP", ("--engine", "ddp"))
ZERO: Final = tuple(Scheme(f"ZeRO-{stage}", ("--zero-stage", str(stage))) for stage in (1, 2, 3))
TENSOR: Final = Scheme("tensor", ("--zero-stage", "0"), {"model_parallel_size": 2}, model_ranks=2)
PIPELINE: Final = Scheme(
    "pipeline", ("--zero-stage", "0"), {"pipe_parallel_size": 2}, model_ranks=2, micro_batches=MICRO_BATCHES
)
ZERO_AND_TENSOR: Final = Scheme("ZeRO-1 and tensor", ("--zero-stage", "1"), {"model_parallel_size": 2}, model_ranks=2)
"""Scheme of figures 1 and 2, there with 8 tensor-parallel ranks."""

SCHEMES: Final = (DDP, *ZERO, TENSOR, PIPELINE, ZERO_AND_TENSOR)
WIDENED: Final = (DDP, ZERO[0], TENSOR, PIPELINE, ZERO_AND_TENSOR)
"""Schemes that also train a wider model."""


@dataclass(frozen=True)
class Point:
    """One training run."""

    scheme: Scheme
    hidden: int
    seq_length: int
    ranks: int
    repeat: int

    @property
    def key(self) -> str:
        """Name of its folder."""
        return f"{self.scheme.key}-h{self.hidden}-s{self.seq_length}-n{self.ranks}-{self.repeat}"

    @property
    def title(self) -> str:
        """Title in the progress bar."""
        return f"{self.scheme.name}, hidden {self.hidden}, sequence {self.seq_length}, time {self.repeat}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that override the shipped demo.yml."""
        return {"num_layers": LAYERS, "hidden_size": self.hidden, "num_attention_heads": HEADS, **self.scheme.settings}

    @property
    def program(self) -> list[str]:
        """Arguments of torchrun, in a folder with `settings.yml`."""
        return [
            "-m", "examples.gpt_neox.train", "demo.yml", "settings.yml", *self.scheme.options,
            "--micro-batch", "1", "--gradient-accumulation", str(self.scheme.micro_batches),
            "--seq-length", str(self.seq_length), "--train-iters", str(STEPS), "--precision", "fp32",
        ]  # fmt: skip

    @property
    def command(self) -> str:
        """Shell command that repeats it."""
        run = ["COMMTRACE=log", "OMP_NUM_THREADS=1", "torchrun", *torchrun(self.ranks), *self.program]
        return f"echo '{json.dumps(self.settings)}' > settings.yml; {' '.join(run)}"

    @property
    def flops_per_token(self) -> float:
        """FLOP of forward and backward, 72 L h^2 (1 + s / 6h + V / 12Lh): arXiv 2104.04473, eq. 3, no recomputation."""
        s, h = self.seq_length, self.hidden
        return 72 * LAYERS * h * h * (1 + s / (6 * h) + VOCABULARY / (12 * LAYERS * h))


@dataclass(frozen=True)
class Messages:
    """A run of messages between two ranks that do nothing else, on new connections."""

    lazy: bool
    """Whether connections are created on first use instead of with the group."""
    repeat: int

    @property
    def key(self) -> str:
        """Name of its folder."""
        return f"messages-{'lazy' if self.lazy else 'eager'}-{self.repeat}"

    @property
    def title(self) -> str:
        """Title in the progress bar."""
        return f"messages, connections made {'when used' if self.lazy else 'at once'}, time {self.repeat}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables, of gloo."""
        return {"TORCH_GLOO_LAZY_INIT": "1" if self.lazy else "0"}

    @property
    def program(self) -> list[str]:
        """Arguments of torchrun."""
        return ["-m", "examples.paper_study.timing.bare_messages"]

    @property
    def command(self) -> str:
        """Shell command that repeats it."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join(["COMMTRACE=log", "OMP_NUM_THREADS=1", *variables, "torchrun", *torchrun(2), *self.program])


def torchrun(ranks: int) -> list[str]:
    """Return the options of torchrun."""
    return ["--standalone", "--nproc-per-node", str(ranks)]


def schemes(ranks: int) -> list[Scheme]:
    """Return the schemes that are possible with a number of ranks.

    Raises CommtraceError for a single rank.
    """
    if ranks < 2:
        raise CommtraceError(f"--nproc {ranks}: one rank has nobody to communicate with; give 2 or more")
    possible = [scheme for scheme in SCHEMES if ranks % scheme.model_ranks == 0]
    return possible if ranks >= 4 else [scheme for scheme in possible if scheme != ZERO_AND_TENSOR]


def points(ranks: int, *, quick: bool) -> list[Point]:
    """Return all training runs in their order: every point once before any is repeated.

    Other load on the machine then affects all points alike.
    """
    return [point for repeat in range(1, 2 if quick else REPEATS + 1) for point in _once(ranks, repeat, quick)]


def _once(ranks: int, repeat: int, quick: bool) -> Iterator[Point]:
    possible = schemes(ranks)
    lengths = LENGTHS[:2] if quick else LENGTHS
    for length in sorted(lengths, key=lambda value: value != LENGTH):
        swept = possible if length == LENGTH else [scheme for scheme in possible if scheme != ZERO_AND_TENSOR]
        yield from (Point(scheme, HIDDEN, length, ranks, repeat) for scheme in swept)
    if not quick:
        yield from (Point(scheme, LARGER_HIDDEN, LENGTH, ranks, repeat) for scheme in possible if scheme in WIDENED)


def messages(*, quick: bool) -> list[Messages]:
    """Return all runs of bare messages."""
    return [Messages(lazy, repeat) for repeat in range(1, 2 if quick else REPEATS + 1) for lazy in (False, True)]
