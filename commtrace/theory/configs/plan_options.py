"""A planned job, and the options that complete the configuration files that describe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from commtrace.errors import ConfigError
from commtrace.job_row import JobRow

from .rank_layout import RankLayout

PlanError: TypeAlias = ConfigError
"""The configuration is incomplete or inconsistent; the message says what to add or change."""


@dataclass(frozen=True)
class PlanOptions:
    """Settings that complete or override those of the files; None: as in the files."""

    engine: str | None = None  # "deepspeed", "ddp" or "fsdp"
    zero_stage: int | None = None  # ZeRO stage, 0 to 3
    precision: str | None = None  # "fp32", "bf16" or "fp16"
    micro_batch: int | None = None  # sequences of one rank in a micro-batch
    accumulation: int | None = None  # micro-batches of a step
    layers: int | None = None  # layers of the model, where no file describes it
    hidden: int | None = None  # hidden size of the model
    vocabulary: int | None = None  # rows of the embedding, with padding
    tied: bool = False  # whether the head uses the embedding's matrix
    groups: int = 2  # parameter groups of the optimizer; 2: biases and norms form a second one

    @property
    def describes_model(self) -> bool:
        """Whether any option describes the model."""
        return any((self.layers, self.hidden, self.vocabulary, self.tied))


DEFAULT_OPTIONS: Final = PlanOptions()


@dataclass(frozen=True)
class JobPlan:
    """A job that has not run."""

    rows: tuple[JobRow, ...]
    """Rows of the `job` table, as the hooks would capture them: one, or one for each stage of a pipeline."""
    layout: RankLayout  # ranks and batch sizes
    assumed: tuple[str, ...]  # what the files do not say, as sentences without a full stop

    @property
    def row(self) -> JobRow:
        """The row; in a pipeline, the first stage's."""
        return self.rows[0]
