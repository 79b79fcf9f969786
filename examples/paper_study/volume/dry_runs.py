"""Dry runs of the volume part: model, division, number of ranks, and the ranks that are run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeAlias

from commtrace.errors import CommtraceError, MissingLibraryError
from examples.paper_study.experiments import execute
from examples.paper_study.parts import Experiment

try:
    from commtrace.errors import ConfigError
    from commtrace.theory.configs.gpt_neox.yaml_files import find_file
    from examples.gpt_neox.config import load_config
except ImportError as error:
    raise MissingLibraryError(f"the study needs {error.name}; pip install '.[examples]' in the checkout") from None

SETTINGS: Final = "settings.yml"
TRAIN: Final = ("-m", "examples.gpt_neox.train")

DDP: Final = "DDP"
ZERO_1: Final = "ZeRO-1"
ZERO_2: Final = "ZeRO-2"
ZERO_3: Final = "ZeRO-3"
DATA_PARALLEL: Final = (DDP, ZERO_1, ZERO_2, ZERO_3)

_LIBRARIES: Final = ("torch", "deepspeed", "commtrace")
_SECONDS_OF_A_RANK: Final = 9.0
"""CPU time of one rank's process, most of it importing torch and DeepSpeed."""


@dataclass(frozen=True)
class DryRun:
    """A dry run of some ranks of a job."""

    model: str
    """A GPT-NeoX file, or the name of a shipped one."""
    world: int
    scheme: str = ZERO_1
    """Scheme of data parallelism; with stages or tensor parallelism, among the remaining ranks."""
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 0
    """Tokens of a sequence; 0: as in the file."""
    micro_batches: int = 1
    ranks: tuple[int, ...] = ()
    """Ranks that are run; empty: the first of each stage."""
    switches: str = "{}"
    """Further settings, as JSON."""
    note: str = ""
    """Name of the further settings."""

    @property
    def name(self) -> str:
        """The paper's name of the model."""
        return model_name(self.model)

    @property
    def division(self) -> str:
        """How the model is divided."""
        parts = [f"pipeline {self.pipeline}"] * (self.pipeline > 1) + [f"tensor {self.tensor}"] * (self.tensor > 1)
        return " x ".join(parts) or self.scheme

    @property
    def label(self) -> str:
        """Readable description of the run."""
        sequence = f", sequences of {self.sequence:,}" if self.sequence else ""
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        note = f", {self.note}" if self.note else ""
        alike = f", {len(self.ranks)} ranks alike" if self.ranks else ""
        return f"{self.name} {self.division} on {self.world:,} ranks{sequence}{batches}{note}{alike}"

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.pipeline * self.tensor)

    @property
    def of_stages(self) -> tuple[int, ...]:
        """First rank of each stage; stages are outermost in GPT-NeoX's order of ranks."""
        return tuple(range(0, self.world, self.world // self.pipeline))

    @property
    def run(self) -> tuple[int, ...]:
        """The ranks that are run."""
        return self.ranks or self.of_stages

    @property
    def steps(self) -> int:
        """Number of steps, so that the last one equals all that would follow.

        DDP rebuilds its buckets in the second step, ZeRO-3 has the order of modules after two, and stages exchange
        shapes in the first.
        """
        return 3 if self.scheme in (DDP, ZERO_3) else 2

    @property
    def settings(self) -> dict[str, Any]:
        """GPT-NeoX keys that override the model's file."""
        lengths = {"seq_length": self.sequence, "max_position_embeddings": self.sequence} if self.sequence else {}
        stage = {} if self.scheme == DDP else {"zero_optimization": {"stage": int(self.scheme[-1])}}
        keys = {
            "pipe_parallel_size": self.pipeline,
            "model_parallel_size": self.tensor,
            "gradient_accumulation_steps": self.micro_batches,
            "train_iters": self.steps,
            "lr_decay_iters": self.steps,
            **lengths,
            **stage,
        }
        return _merged(keys, json.loads(self.switches))

    @property
    def arguments(self) -> list[str]:
        """Arguments of the training after the model's file and SETTINGS."""
        return ["--engine", "ddp"] if self.scheme == DDP else []

    @property
    def key(self) -> str:
        """Name of the result: a description, and a digest of everything that it depends on."""
        description = json.dumps(
            [self.settings, self.arguments, self.run, self.world, find_file(self.model).read_text()]
        )
        digest = hashlib.sha256((description + _versions()).encode()).hexdigest()[:10]
        note = f"-{self.note}" if self.note else ""
        name = f"{self.name}-{self.division}{note}-{self.world}"
        name += f"-{self.sequence}" if self.sequence else ""
        return f"{re.sub('[^A-Za-z0-9.]+', '-', name)}-{digest}"

    @property
    def command(self) -> str:
        """Shell command that repeats the run."""
        ranks = ",".join(map(str, self.run))
        train = shlex.join(["python", *TRAIN, self.model, SETTINGS, *self.arguments])
        file = f"echo {shlex.quote(json.dumps(self.settings))} > {SETTINGS}"
        return f"{file}; commtrace dryrun --world-size {self.world} --ranks {ranks} {train}"

    def impossible(self) -> str:
        """Return why the configuration is not possible; empty if it is."""
        try:
            config = load_config([self.model], self.settings)
            config.batch_shape(config.data_parallel(self.world))
        except ConfigError as error:
            return str(error).removeprefix("command line: ")
        return ""

    def experiment(self) -> Experiment:
        """Return the run as an experiment of the study."""
        ranks = len(self.run)
        # Ranks that exchange shapes are run more than once.
        times = 2 if self.pipeline > 1 and self.tensor > 1 else 1
        many = self.world / 40 if self.scheme == ZERO_3 else 0
        seconds = (_SECONDS_OF_A_RANK + many) * ranks * times
        return Experiment(self.key, self.label, self._run, seconds, command=self.command)

    def _run(self, folder: Path) -> None:
        (folder / SETTINGS).write_text(json.dumps(self.settings) + "\n")
        execute(
            [
                sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", str(self.world),
                "--ranks", ",".join(map(str, self.run)), "--jobs", "1", "--out", str(folder), "--",
                sys.executable, *TRAIN, str(find_file(self.model)), str(folder / SETTINGS), *self.arguments,
            ],
            folder,
        )  # fmt: skip


def model_name(model: str) -> str:
    """Return the paper's name of a model (1.3B for 1-3B), or the name of a file."""
    name = Path(model).name.removesuffix(".yml")
    return "1.3B" if name == "1-3B" else name


def check(model: str) -> None:
    """Raise CommtraceError if the model cannot be read."""
    try:
        load_config([model])
    except ConfigError as error:
        raise CommtraceError(f"--models: {error}") from error


def shape_of(model: str) -> dict[str, int]:
    """Return `vocabulary` (padded), `hidden`, `layers` and `sequence` of a model, the inputs of equation 1."""
    config = load_config([model])
    return {
        "vocabulary": config.padded_vocab_size,
        "hidden": config.hidden_size,
        "layers": config.num_layers,
        "sequence": config.seq_length,
    }


def _merged(keys: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    blocks = {name: {**keys[name], **value} for name, value in more.items() if isinstance(keys.get(name), dict)}
    return {**keys, **more, **blocks}


def _versions() -> str:
    return " ".join(f"{name} {_version(name)}" for name in _LIBRARIES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


# ---- the plan --------------------------------------------------------------------------------------------------------

NODE: Final = 8
"""Ranks of a node: the paper's nodes have 8 GCDs."""
FEW_NODES: Final = 2 * NODE
"""The paper's figures 9, 14 and 15 are of two nodes."""
SOME, MANY = 64, 1024
LENGTHS: Final = (512, 1024, 2048, 4096, 8192)
LONG_SEQUENCES_OF: Final = "1.3B"
"""The paper's figures 14 and 15 are of this model."""
_TOO_LARGE_FOR_A_NODE: Final = ("13B", "20B")

Division: TypeAlias = tuple[int, int]
"""Stages, and tensor-parallel ranks."""

DIVISIONS: Final[tuple[Division, ...]] = ((2, 1), (4, 1), (1, 2), (1, 4), (1, 8), (2, 2))
OF_LARGER_MODELS: Final[tuple[Division, ...]] = ((2, 4), (4, 2))
OF_THE_LARGEST: Final[tuple[Division, ...]] = ((8, 1),)
QUICK_DIVISIONS: Final[tuple[Division, ...]] = ((2, 1), (1, 2), (2, 2))

OWNERS: Final = '{"zero_optimization": {"use_multi_rank_bucket_allreduce": false}}'
RELEASE: Final = (
    '{"zero_optimization": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, '
    '"stage3_param_persistence_threshold": 0}, "checkpoint_activations": false}'
)


@dataclass(frozen=True)
class Plan:
    """All dry runs by purpose; a run may be in several lists."""

    node: tuple[DryRun, ...]
    """Data parallelism on a node, or on two for models too large for one in the paper (figures 7, 8, 10)."""
    sizes: tuple[DryRun, ...]
    """ZeRO-3 on two nodes (figure 9)."""
    scaled: tuple[DryRun, ...]
    """Data parallelism on increasing numbers of ranks."""
    divided: tuple[DryRun, ...]
    """Stages, tensor parallelism, or both, without data parallelism (figures 11 to 13)."""
    combined: tuple[DryRun, ...]
    """The same at the largest scale, with data parallelism."""
    lengths: tuple[DryRun, ...]
    """Several sequence lengths, on two nodes (figures 14, 15)."""
    switched: tuple[DryRun, ...]
    """Runs with settings under which the closed forms hold."""
    alike: tuple[DryRun, ...]
    """Several ranks of a stage, which should make the same calls."""
    batches: tuple[DryRun, ...]
    """Stages with several micro-batches."""
    impossible: Mapping[DryRun, str]
    """Runs that are not possible, and why."""

    @property
    def all(self) -> tuple[DryRun, ...]:
        """All runs, each once; those of the paper first."""
        families = (
            self.node, self.sizes, self.switched, self.divided, self.batches, self.lengths, self.alike, self.combined,
            self.scaled,
        )  # fmt: skip
        return tuple(dict.fromkeys(run for of in families for run in of))


def plan(models: Sequence[str], *, quick: bool) -> Plan:
    """Return the dry runs for these models. Raises CommtraceError if a model cannot be read."""
    for model in models:
        check(model)
    # The smallest model is enough where size does not matter.
    smallest, middle = models[0], next((run for run in models if model_name(run) == LONG_SEQUENCES_OF), models[0])
    lists: dict[str, list[DryRun]] = {
        "node": [DryRun(model, _node(model), scheme) for model in models for scheme in DATA_PARALLEL],
        "sizes": [DryRun(model, FEW_NODES, ZERO_3) for model in models],
        "divided": [
            DryRun(model, p * t, pipeline=p, tensor=t) for model in models for p, t in _divisions(model, models, quick)
        ],
        "lengths": _by_length(middle, LENGTHS[:3:2] if quick else LENGTHS),
        "switched": [
            DryRun(smallest, NODE, ZERO_2, switches=OWNERS, note="owners"),
            DryRun(smallest, NODE, ZERO_3, switches=RELEASE, note="release"),
        ],
        "scaled": [],
        "combined": [],
        "alike": [],
        "batches": [],
    }
    if not quick:
        lists |= {
            "scaled": [
                *(DryRun(middle, SOME, scheme) for scheme in DATA_PARALLEL),
                *(DryRun(model, MANY, scheme) for model in models for scheme in DATA_PARALLEL),
            ],
            "combined": [
                *(DryRun(model, MANY, pipeline=p, tensor=NODE) for model in models[-2:] for p in (1, 2)),
                DryRun(models[-1], MANY, pipeline=NODE),
            ],
            "alike": [
                *(DryRun(smallest, NODE, scheme, ranks=(0, NODE - 1)) for scheme in DATA_PARALLEL),
                # First and last rank of each stage, which differ in both other dimensions.
                DryRun(smallest, NODE, pipeline=2, tensor=2, ranks=(0, NODE // 2 - 1, NODE // 2, NODE - 1)),
            ],
            "batches": [DryRun(middle, 4, pipeline=4, micro_batches=8)],
        }
    impossible = {run: why for of in lists.values() for run in of if (why := run.impossible())}
    return Plan(
        **{name: tuple(run for run in of if run not in impossible) for name, of in lists.items()},
        impossible=impossible,
    )


def _divisions(model: str, models: Sequence[str], quick: bool) -> tuple[Division, ...]:
    """Return the divisions of a model; larger models have more."""
    if quick:
        return QUICK_DIVISIONS
    larger = OF_LARGER_MODELS if model in models[-2:] else ()
    return (*DIVISIONS, *larger, *(OF_THE_LARGEST if model == models[-1] else ()))


def _by_length(model: str, lengths: Sequence[int]) -> list[DryRun]:
    """Return runs of ZeRO, stages, tensor parallelism and both, on two nodes; of ZeRO, at few lengths only."""
    few = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    zero = [DryRun(model, FEW_NODES, scheme, sequence=length) for scheme in DATA_PARALLEL[1:] for length in few]
    divided = [
        DryRun(model, FEW_NODES, pipeline=p, tensor=t, sequence=length)
        for p, t in QUICK_DIVISIONS
        for length in lengths
    ]
    return [_as_the_file_says(run) for run in dict.fromkeys((*zero, *divided))]


def _node(model: str) -> int:
    return FEW_NODES if model_name(model) in _TOO_LARGE_FOR_A_NODE else NODE


def _as_the_file_says(run: DryRun) -> DryRun:
    """Drop a length that equals the model file's, so that equal runs of two figures have the same key."""
    return replace(run, sequence=0) if run.sequence == shape_of(run.model)["sequence"] else run
