"""The part of a job row that describes a pipeline: this rank's stage, what it sends, and weights that it shares."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

from commtrace.hooks.torch.model_facts import dtype_name
from commtrace.job_row import StageRow, TiedRow
from commtrace.patching import record_before_call

# For each pipeline module: dtypes of tied weights when they were first synchronized. The engine may cast them later.
_first_dtypes: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], str]] = weakref.WeakKeyDictionary()


def tied_weights(module: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield weights that other stages have too: (key of the tied layers, attribute) and this stage's copy."""
    for key, tied in module.tied_comms.items():
        for name in tied["weight_attr"]:
            yield (key, name), module._recursive_getattr(tied["module"], name)


def _dtypes(module: Any) -> dict[tuple[str, str], str]:
    return {key: dtype_name(weight.dtype) for key, weight in tied_weights(module)}


note_dtypes: Final = record_before_call(_first_dtypes, _dtypes)
"""Wrapper of `PipelineModule._synchronize_tied_weights`."""


def describe_stage(engine: Any) -> StageRow:
    """Return the description of this rank's stage. Raises AttributeError for an engine without stages."""
    module = engine.module
    settings = engine._config.pipeline
    return StageRow(
        stage=engine.stage_id,
        bounds=[int(bound) for bound in module.parts],
        layers=[_layer_name(layer) for layer in module._layer_specs[module._local_start : module._local_stop]],
        pipe_partitioned=bool(settings["pipe_partitioned"]),
        grad_partitioned=bool(settings["grad_partitioned"]),
        activation_checkpoint_interval=int(module.activation_checkpoint_interval),
        use_reentrant=bool(settings["use_reentrant"]),
        attention_mask=bool(engine.has_attention_mask),
        bool_tensors=bool(engine.has_bool_tensors),
        dynamic_shape=bool(engine.dynamic_shape),
        tied=[_describe_tied(engine, key, weight) for key, weight in tied_weights(module)],
    )


def _describe_tied(engine: Any, key: tuple[str, str], weight: Any) -> TiedRow:
    names = [name for name, parameter in engine.module.named_parameters() if parameter is weight]
    ranks = engine.module.tied_comms[key[0]]["ranks"]
    return TiedRow(parameter=names[0], ranks=len(ranks), first_dtype=_first_dtypes[engine.module][key])


def _layer_name(layer: Any) -> str:
    """Return the name by which DeepSpeed partitions layers by type."""
    type_of_spec = getattr(layer, "typename", None)
    return str((type_of_spec or (layer if hasattr(layer, "__name__") else type(layer))).__name__)
