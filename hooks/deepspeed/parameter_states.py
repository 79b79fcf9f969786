"""What gathers and keeps ZeRO-3's parameters besides passes: entries of the table `passes`, which rules start from.

Checkpoints and a program's own `GatheredParameters` leave other parameters gathered than passes do. Which ones is read
at the next pass, from their states.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from commtrace.hooks.marked_sources import imported
from commtrace.hooks.torch.model_facts import parameter_numbers
from commtrace.job_row import ModuleRow, PassRow
from commtrace.patching import Patches, around

_ZERO: Final = "deepspeed.runtime.zero"
_ORDER: Final = "_PartitionedParameterCoordinator__submodule_order"
"""Attribute of the coordinator: modules in the order in which they ran, while it records them."""

_patches = Patches()
to_note: dict[int, bool] = {}
"""id of each engine for whose next pass `pass_begins` is to be called -> whether that is its first one."""
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


@_patches.installer
def install() -> None:
    """Hook what gathers or partitions parameters outside of passes."""
    optimizer = imported(f"{_ZERO}.stage3", "DeepSpeedZeroOptimizer_Stage3")
    if optimizer is not None:
        _patches.wrap(optimizer, "checkpoint_event_epilogue", _changing)
    gathered = imported(f"{_ZERO}.partition_parameters", "GatheredParameters")
    if gathered is not None:
        _patches.wrap(gathered, "__exit__", _changing)
    _patches.on_undo(_engines.clear)
    _patches.on_undo(to_note.clear)


uninstall = _patches.undo


@around
def _changing(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    for engine in _engines:
        to_note.setdefault(id(engine), False)
    return original(self, *args, **kwargs)


class Beginning(NamedTuple):
    """What is noted as a pass of an engine begins."""

    is_first: bool
    gathered: PassRow | None
    """The parameters that are gathered, if something else than passes decided it."""


def add(engine: Any) -> None:
    """Add an engine that has been built."""
    _engines.add(engine)
    to_note[id(engine)] = True


def pass_begins(engine: Any) -> Beginning:
    """Return what is to be noted as a pass of an engine begins that is in `to_note`."""
    is_first = to_note.pop(id(engine))
    return Beginning(is_first, _gathered(engine, is_first) if int(engine.zero_optimization_stage()) == 3 else None)


def _gathered(engine: Any, is_first: bool) -> PassRow | None:
    parameters = [*engine.module.parameters()]
    gathered = [number for number, parameter in enumerate(parameters) if parameter.ds_status.name == "AVAILABLE"]
    persistent = [number for number, parameter in enumerate(parameters) if parameter.ds_persist]
    if is_first and not gathered:
        return None
    return PassRow(kind="gathered", times=1, parameters=None if gathered == persistent else gathered)


def modules_of_first_pass(engine: Any, modules: list[ModuleRow]) -> list[PassRow]:
    """Return what a training's first pass shows of modules: those that did not run, and parameters of others in use.

    `modules` are those of the engine's job. A module below a leaf counts as the leaf.
    """
    numbers = parameter_numbers(engine.module)
    rows = {row.name: number for number, row in enumerate(modules)}
    used: dict[tuple[str, int], set[int]] = defaultdict(set)
    named = dict(engine.module.named_modules())
    for name, module in named.items():
        for parameter in getattr(module, "_external_params", {}).values():
            kind = "returned" if parameter.is_external_param else "external"
            used[kind, _row_of(name, rows)].add(numbers[id(parameter)])
    entries = [
        PassRow(kind=kind, times=1, modules=[row], parameters=sorted(found)) for (kind, row), found in used.items()
    ]
    order = _order(engine.optimizer.parameter_offload)
    idle = [number for name, number in rows.items() if named[name] not in order] if order else []
    return [*entries, PassRow(kind="idle", times=1, modules=idle)] if idle else entries


def _order(offload: Any) -> Sequence[Any]:
    """Return the modules in the order in which they ran, if a coordinator is recording it; () otherwise."""
    coordinator = getattr(offload, "param_coordinator", None)
    if coordinator is None:  # DeepSpeed 0.15 has one for training, and one for evaluation
        coordinator = getattr(offload, "param_coordinators", {}).get(True)
    return getattr(coordinator, _ORDER, ())


def _row_of(name: str, rows: dict[str, int]) -> int:
    while name not in rows:
        name = name.rpartition(".")[0]
    return rows[name]
