"""Configuration files as a planned job: GPT-NeoX's YAML, DeepSpeed's JSON, a Hugging Face `config.json`.

The kind of a file follows from its keys: `model_type` is Hugging Face's; `num_layers` and `hidden_size` are GPT-NeoX's,
and so is all YAML; other JSON is DeepSpeed's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from commtrace.errors import MissingLibraryError
from commtrace.job_row import ModelSettings
from commtrace.theory.model_shapes import ModelShape, ModuleSpec, gpt_neox_model

from . import hugging_face
from .deepspeed_job_row import deepspeed_row
from .plan_options import DEFAULT_OPTIONS, JobPlan, PlanError, PlanOptions
from .rank_layout import ELEMENT_TYPES, RankLayout, complete_batch_sizes
from .torch_job_rows import ddp_row, fsdp_row

_BATCH_SIZES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KINDS: Final = {"deepspeed": "DeepSpeed configuration", "hugging_face": "Hugging Face model"}


def plan_job(files: Sequence[str], world: int, options: PlanOptions = DEFAULT_OPTIONS) -> JobPlan:
    """Return the job that configuration files describe.

    Args:
        files: GPT-NeoX YAML files (later ones win) or names of built-in ones; or a DeepSpeed JSON, a Hugging Face
            `config.json`, or both.
        world: Ranks of the job.
        options: Settings that complete or override the files.

    Raises:
        PlanError: If the files and options do not describe a valid job.
        NotPredictedError: If a setting has no rules.
    """
    names: dict[str, list[str]] = {}
    contents: dict[str, Mapping[str, Any]] = {}
    for name in files:
        content = _read(name)
        kind = _kind(name, content)
        names.setdefault(kind, []).append(name)
        contents[kind] = content
    if "gpt_neox" in names:
        if len(names) > 1 or replace(options, vocabulary=None).describes_model or options.groups != 2:
            raise PlanError(
                f"{names['gpt_neox'][0]}: a GPT-NeoX file describes all but the vocabulary; leave out other kinds of "
                "files, and model options other than --vocabulary"
            )
        from .gpt_neox.planning import plan_gpt_neox

        return plan_gpt_neox(files, world, options)
    for kind, same_kind in names.items():
        if len(same_kind) > 1:
            raise PlanError(f"{', '.join(same_kind)}: more than one {_KINDS[kind]}; give one of them")
    model, assumed = _model(contents.get("hugging_face"), options)
    return _plan_model(model, assumed, contents, world, options)


def _kind(name: str, content: Mapping[str, Any]) -> str:
    if "model_type" in content or "architectures" in content:
        return "hugging_face"
    keys = {str(key).replace("-", "_") for key in content}
    return "gpt_neox" if {"num_layers", "hidden_size"} <= keys or Path(name).suffix != ".json" else "deepspeed"


def _read(name: str) -> Mapping[str, Any]:
    """Return a file's keys and values. If there is no such file, it may be a built-in GPT-NeoX configuration."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        try:
            import pydantic  # noqa: F401

            from .gpt_neox.yaml_files import find_file, read_file
        except ImportError as error:
            raise MissingLibraryError.of_extra(f"{name}, YAML of GPT-NeoX", error.name, "theory") from error
        return {key: setting.value for key, setting in read_file(find_file(name)).items()}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a configuration is an object of keys and values; this one holds {content!r:.60}")
    return content


# --- DeepSpeed, Hugging Face ----------------------------------------------------------------------------------------


def _model(config: Mapping[str, Any] | None, options: PlanOptions) -> tuple[ModuleSpec, tuple[str, ...]]:
    """Return the model, and what is assumed about it."""
    if config is not None:
        if options.describes_model:
            raise PlanError("the Hugging Face file describes the model; leave out --layers and other model options")
        kind = config.get("model_type")
        return hugging_face.model(config), (f"the model is transformers' {kind} with its language-modelling head",)
    sizes = {"--layers": options.layers, "--hidden": options.hidden, "--vocabulary": options.vocabulary}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise PlanError(f"no file describes the model; add {', '.join(missing)}, or a model's config.json")
    shape = ModelShape(options.layers or 0, options.hidden or 0, options.vocabulary or 0, options.tied)
    return gpt_neox_model(shape), ("the model has the matrices, biases and norms of GPT-NeoX",)


def _plan_model(
    model: ModuleSpec,
    assumed: Iterable[str],
    contents: Mapping[str, Mapping[str, Any]],
    world: int,
    options: PlanOptions,
) -> JobPlan:
    has_deepspeed = "deepspeed" in contents or options.zero_stage is not None
    engine = options.engine or ("deepspeed" if has_deepspeed else "ddp")
    hugging_face_config = contents.get("hugging_face")
    hidden = options.hidden or (hugging_face.hidden_size(hugging_face_config) if hugging_face_config else 0)
    settings = _complete_settings(dict(contents.get("deepspeed", {})), hidden, options)
    layout = _layout(settings, world, options)
    precision = options.precision or "fp32"
    if engine == "ddp":
        note = f"all parameters are {ELEMENT_TYPES[precision]} (--precision)"
        return JobPlan((ddp_row(model, precision, layout),), layout, (*assumed, note))
    if engine == "fsdp":
        units = "every layer is a unit of fully_shard, and so is the model itself"
        types = f"parameters are fp32, and are sent as {ELEMENT_TYPES[precision]} (--precision)"
        row = fsdp_row(model, precision, layout)
        row.model = ModelSettings(
            model_parallel_size=1,
            gradient_accumulation_steps=layout.gradient_accumulation_steps,
            gradient_clipping=float(settings.get("gradient_clipping") or 0.0),
        )
        return JobPlan((row,), layout, (*assumed, units, types))
    groups = "biases and norms are a second parameter group" if options.groups == 2 else "one parameter group"
    row = deepspeed_row(model, settings, layout, groups=options.groups)
    return JobPlan((row,), layout, (*assumed, f"{groups} (--groups)", "activations are not recomputed"))


def _complete_settings(config: dict[str, Any], hidden: int, options: PlanOptions) -> dict[str, Any]:
    """Return DeepSpeed's configuration with the options, and without "auto"."""
    if options.precision is not None:
        for name in ("fp16", "bf16"):
            config[name] = {**_block(config, name), "enabled": options.precision == name}
    zero = _block(config, "zero_optimization")
    if options.zero_stage is not None:
        zero["stage"] = options.zero_stage
    # Values with which Hugging Face's Trainer replaces "auto" (HfTrainerDeepSpeedConfig.trainer_config_finalize).
    auto = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    zero |= {name: value for name, value in auto.items() if zero.get(name) == "auto" and hidden}
    config["zero_optimization"] = zero
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = 1.0  # TrainingArguments.max_grad_norm
    for name, value in [*config.items(), *((f"zero_optimization.{key}", value) for key, value in zero.items())]:
        if value == "auto" and name not in _BATCH_SIZES:
            raise PlanError(f'{name} is "auto"; replace it with a number')
    for name in ("fp16", "bf16"):
        if _block(config, name).get("enabled") == "auto":
            raise PlanError(f'{name}.enabled is "auto"; set it with --precision')
    return config


def _block(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise PlanError(f"{name} is a block of keys and values, not {value!r:.60}")
    return dict(value)


def _layout(config: Mapping[str, Any], world: int, options: PlanOptions) -> RankLayout:
    """Return a layout of data-parallel ranks. Batch sizes in the options replace train_batch_size."""
    total, micro, steps = (_batch_size(config, name) for name in _BATCH_SIZES)
    if options.micro_batch or options.accumulation:
        micro, steps, total = options.micro_batch or micro, options.accumulation or steps, None
    return RankLayout(world, world, *complete_batch_sizes(world, micro, steps, total, _BATCH_SIZES[0]))


def _batch_size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value in (None, "auto"):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}; give a whole number of at least 1")
    return value
