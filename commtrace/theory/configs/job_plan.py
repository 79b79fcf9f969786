"""Configuration files as a job: GPT-NeoX's YAML, DeepSpeed's JSON, a Hugging Face `config.json`, or two of them.

Which kind a file is, its keys say: `model_type` is Hugging Face's, `num_layers` and `hidden_size` are GPT-NeoX's, as is
whatever is YAML; other JSON is DeepSpeed's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commtrace.errors import CommtraceError, ConfigError, MissingLibraryError
from commtrace.theory.model_shapes import ModelShape, ModuleSpec, gpt_neox_model

from . import hugging_face
from .ddp_job_row import ddp_row
from .deepspeed_job_row import deepspeed_row
from .dtensor_job_row import dtensor_row
from .fsdp_job_row import FsdpSharding, fsdp_row
from .pipeline_job_rows import StageDivision, stage_rows
from .rank_layout import ELEMENT_TYPES, RankLayout

if TYPE_CHECKING:
    from .gpt_neox.config import NeoxConfig

ENGINES: Final = ("deepspeed", "ddp", "fsdp")


class PlanError(CommtraceError):
    """The configuration does not say what is to be predicted; the message says what to add."""


@dataclass(frozen=True)
class PlanOptions:
    """What the command line adds to the files; None: as the files say."""

    engine: str | None = None
    zero_stage: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    tied: bool = False
    groups: int = 2


DEFAULT_OPTIONS: Final = PlanOptions()


@dataclass(frozen=True)
class JobPlan:
    """A job that nobody has started."""

    row: Mapping[str, Any]
    """As the hooks would capture it."""
    layout: RankLayout
    assumed: tuple[str, ...]
    """What the files do not say, and was taken for granted: sentences without their full stop."""
    stages: tuple[Mapping[str, Any], ...] = ()
    """Of a pipeline the rows of its stages, the first of which is `row`; each is of as many ranks."""


def plan_job(files: Sequence[str], world: int, options: PlanOptions = DEFAULT_OPTIONS) -> JobPlan:
    """The job of these files on `world` ranks.

    Raises PlanError for files and options that do not make a job, NotPredictedError for settings without rules.
    """
    kinds: dict[str, list[str]] = {}
    contents: dict[str, Mapping[str, Any]] = {}
    for name in files:
        content = _read(name)
        kind = _kind(name, content)
        kinds.setdefault(kind, []).append(name)
        contents[kind] = content
    if "gpt_neox" in kinds:
        if len(kinds) > 1 or _has_figures(options):
            raise PlanError(
                f"{kinds['gpt_neox'][0]}: a GPT-NeoX file says all; give no other kinds of files or figures"
            )
        return _of_gpt_neox(files, world, options)
    for kind, names in kinds.items():
        if len(names) > 1:
            raise PlanError(f"{', '.join(names)}: both are of {_NAMES[kind]}; give one of them")
    model, assumed = _model(contents.get("hugging_face"), options)
    config = contents.get("deepspeed")
    engine = options.engine or ("deepspeed" if config is not None or options.zero_stage is not None else "ddp")
    return _of_model(model, config, engine, world, options, assumed, contents.get("hugging_face"))


_NAMES: Final = {"deepspeed": "DeepSpeed", "hugging_face": "a Hugging Face model"}


def _has_figures(options: PlanOptions) -> bool:
    return any((options.layers, options.hidden, options.vocabulary, options.tied)) or options.groups != 2


def _kind(name: str, content: Mapping[str, Any]) -> str:
    if "model_type" in content or "architectures" in content:
        return "hugging_face"
    keys = {str(key).replace("-", "_") for key in content}
    return "gpt_neox" if {"num_layers", "hidden_size"} <= keys or Path(name).suffix != ".json" else "deepspeed"


def _read(name: str) -> Mapping[str, Any]:
    """A file's keys and values. A name without a file may be that of a shipped GPT-NeoX configuration."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return _read_yaml(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a configuration is an object of keys and values; this one holds {content!r:.60}")
    return content


def _read_yaml(name: str) -> Mapping[str, Any]:
    try:
        import pydantic  # noqa: F401

        from .gpt_neox.yaml_files import find_file, read_file
    except ImportError as error:
        raise MissingLibraryError(
            f"{name}: GPT-NeoX's YAML needs {error.name}; pip install 'commtrace[theory]'"
        ) from error
    try:
        return {key: setting.value for key, setting in read_file(find_file(name)).items()}
    except ConfigError as error:
        raise PlanError(str(error)) from error


# --- GPT-NeoX -------------------------------------------------------------------------------------------------------


def _of_gpt_neox(files: Sequence[str], world: int, options: PlanOptions) -> JobPlan:
    from .gpt_neox.config import load_config
    from .gpt_neox.deepspeed_settings import deepspeed_config
    from .gpt_neox.neox_args import neox_args
    from .gpt_neox.setting_checks import check_engine

    overrides = {
        "zero_stage": options.zero_stage,
        "precision": options.precision,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
    }
    try:
        config = load_config(files, overrides)
        check_engine(config, options.engine or "deepspeed")
        data = config.data_parallel(world)
        layout = RankLayout(world, data, *config.batch_shape(data), **config.shared)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    figures = ModelShape(
        config.num_layers,
        config.hidden_size,
        config.padded_vocab_size,
        not config.no_weight_tying,
        layout.tensor,
        config.moe_num_experts,
        config.moe_num_experts // config.moe_expert_parallel_size,
        config.moe_expert_interval,
    )
    model = gpt_neox_model(figures)
    assumed = _assumed_of(config)
    told = {"model": vars(neox_args(config, layout.micro_batch, layout.accumulation))}
    if options.engine not in (None, "deepspeed") and config.pipe_parallel_size > 1:
        raise PlanError(
            f"pipeline parallelism is DeepSpeed's; set pipe_parallel_size to 1 with --engine {options.engine}"
        )
    if options.engine == "ddp":
        return JobPlan({**ddp_row(model, config.precision, layout), **told}, layout, assumed)
    if options.engine == "fsdp":
        return JobPlan({**_fsdp_row(config, layout), **told}, layout, assumed)
    settings = deepspeed_config(config, layout.micro_batch, layout.accumulation, verbose=False)
    if config.pipe_parallel_size > 1:
        interval = config.checkpoint_num_layers if config.checkpoint_activations else 0
        division = StageDivision(config.pipe_parallel_size, config.pipe_partition_method, interval)
        stages = tuple({**row, **told} for row in stage_rows(figures, settings, layout, division))
        return JobPlan(stages[0], layout, assumed, stages)
    return JobPlan({**deepspeed_row(model, settings, layout), **told}, layout, assumed)


def _fsdp_row(config: NeoxConfig, layout: RankLayout) -> dict[str, Any]:
    """`fully_shard`, or where no ranks are left for it tensor parallelism alone."""
    whole = gpt_neox_model(
        ModelShape(config.num_layers, config.hidden_size, config.padded_vocab_size, not config.no_weight_tying)
    )
    if layout.data == 1 and layout.tensor > 1:
        return dtensor_row(whole, config.precision, layout, along_sequence=config.fsdp.sequence_parallel)
    return fsdp_row(whole, config.precision, layout, _sharding(config, layout))


def _sharding(config: NeoxConfig, layout: RankLayout) -> FsdpSharding:

    said = config.fsdp
    try:
        shards = said.shards(layout.data)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    wide = "fp32" if config.fp32_allreduce else None
    return FsdpSharding(
        shards,
        said.reshard_after_forward,
        wide,
        said.sync_every_micro_batch,
        said.reshard_after_backward,
        said.sequence_parallel,
    )


def _assumed_of(config: NeoxConfig) -> tuple[str, ...]:
    padded = config.padded_vocab_size
    experts = "tokens go to experts as unevenly as they can, so that sizes are the most (moe_token_dropping is off)"
    bounded = config.moe_expert_parallel_size > 1 and not config.moe_token_dropping
    return (
        *((experts,) if bounded else ()),
        f"a vocabulary of {config.vocab_size:,} ids, padded to {padded:,}",
        "modules are made and run in the order of commtrace's GPT-NeoX workload",
    )


# --- DeepSpeed, Hugging Face ----------------------------------------------------------------------------------------


def _model(config: Mapping[str, Any] | None, options: PlanOptions) -> tuple[ModuleSpec, tuple[str, ...]]:
    if config is not None:
        if _has_figures(PlanOptions(**{**vars(options), "groups": 2})):
            raise PlanError("the Hugging Face file has the model's figures; leave --layers and its like out")
        kind = config.get("model_type")
        return hugging_face.model(config), (f"the model is transformers' {kind} with its language-modelling head",)
    wanted = {"--layers": options.layers, "--hidden": options.hidden, "--vocabulary": options.vocabulary}
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise PlanError(f"no file has the model's figures; add {', '.join(missing)}, or a model's config.json")
    figures = ModelShape(options.layers or 0, options.hidden or 0, options.vocabulary or 0, options.tied)
    return gpt_neox_model(figures), ("the model has the matrices, biases and norms of GPT-NeoX",)


def _of_model(
    model: ModuleSpec,
    config: Mapping[str, Any] | None,
    engine: str,
    world: int,
    options: PlanOptions,
    assumed: Iterable[str],
    hugging: Mapping[str, Any] | None,
) -> JobPlan:
    hidden = options.hidden or (hugging_face.hidden_size(hugging) if hugging is not None else 0)
    settings = _settled(dict(config or {}), hidden, options)
    layout = _layout(settings, world, options)
    if engine == "ddp":
        precision = options.precision or "fp32"
        words = (*assumed, f"all parameters are {ELEMENT_TYPES[precision]} (--precision)")
        return JobPlan(ddp_row(model, precision, layout), layout, words)
    if engine == "fsdp":
        precision = options.precision or "fp32"
        told = {
            "model_parallel_size": 1,
            "gradient_accumulation_steps": layout.accumulation,
            "gradient_clipping": _clipping(settings),
        }
        words = (*assumed, "every layer is a unit of fully_shard, and the model itself", _TRAVEL[precision])
        return JobPlan({**fsdp_row(model, precision, layout, FsdpSharding(layout.data)), "model": told}, layout, words)
    groups = "biases and norms are a group of the optimizer of their own" if options.groups == 2 else "one group"
    row = deepspeed_row(model, settings, layout, groups=options.groups)
    return JobPlan(row, layout, (*assumed, f"{groups} (--groups)", "activations are not recomputed"))


_TRAVEL: Final = {
    precision: f"parameters are fp32, and travel as {name} (--precision)" for precision, name in ELEMENT_TYPES.items()
}


def _clipping(settings: Mapping[str, Any]) -> float:
    return float(settings.get("gradient_clipping") or 0.0)


def _settled(config: dict[str, Any], hidden: int, options: PlanOptions) -> dict[str, Any]:
    """DeepSpeed's configuration with the options, and without "auto"."""
    if options.precision is not None:
        for name in ("fp16", "bf16"):
            config[name] = {**_block(config, name), "enabled": options.precision == name}
    zero = _block(config, "zero_optimization")
    if options.zero_stage is not None:
        zero["stage"] = options.zero_stage
    # What Hugging Face's Trainer puts in place of "auto" (HfTrainerDeepSpeedConfig.trainer_config_finalize).
    auto = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    for name, value in auto.items():
        if zero.get(name) == "auto" and hidden:
            zero[name] = value
    config["zero_optimization"] = zero
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = 1.0  # TrainingArguments.max_grad_norm
    for name, value in [*config.items(), *((f"zero_optimization.{key}", value) for key, value in zero.items())]:
        if value == "auto" and name not in _BATCHES:
            raise PlanError(f'{name} is "auto"; put the number in its place')
    for name in ("fp16", "bf16"):
        if _block(config, name).get("enabled") == "auto":
            raise PlanError(f'{name}.enabled is "auto"; say which with --precision')
    return config


_BATCHES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _block(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise PlanError(f"{name} is a block of keys and values, not {value!r:.60}")
    return dict(value)


def _layout(config: Mapping[str, Any], world: int, options: PlanOptions) -> RankLayout:
    """Any two of the three batch sizes give the third, as in DeepSpeed."""
    total, micro, steps = (_batch(config, name) for name in _BATCHES)
    micro, steps = options.micro_batch or micro, options.accumulation or steps
    if options.micro_batch or options.accumulation:
        total = None
    if total is not None:
        micro = micro or total // (world * (steps or 1))
        steps = steps or total // (world * max(micro, 1))
        if micro * steps * world != total:
            raise PlanError(
                f"train_batch_size {total} is not train_micro_batch_size_per_gpu ({micro}) * "
                f"gradient_accumulation_steps ({steps}) * data-parallel ranks ({world}); change one of them"
            )
    return RankLayout(world, world, micro or 1, steps or 1)


def _batch(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value in (None, "auto"):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}; it is a whole number from 1")
    return value
