"""Functions whose calls have one purpose, whatever they call: gradient norms, checkpoints, the loss.

Installed, module by module, when one of MODULES is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.patching import Patches, around
from commtrace.schema import Phase, Purpose

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_STATE_DICT: Final = f"{_CHECKPOINT}.state_dict"
_CONTEXT: Final = "torch.distributed.tensor.experimental"
_RING: Final = {
    "_templated_ring_attention": Purpose.ATTENTION,
    "_templated_ring_attention_backward": Purpose.ATTENTION_GRADIENTS,
}
_NORMS: Final = ("clip_grad_norm_", "clip_grad_norm", "get_total_norm", "clip_grads_with_norm_")

MODULES: Final[Mapping[str, Mapping[str, Purpose]]] = {
    "torch.distributed.distributed_c10d": dict.fromkeys(("barrier", "monitored_barrier"), Purpose.BARRIER),
    "torch.nn.utils.clip_grad": dict.fromkeys((*_NORMS, "_get_total_norm"), Purpose.GRADIENT_NORM),
    _STATE_DICT: dict.fromkeys(
        (
            *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
            *("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"),
        ),
        Purpose.STATE_DICT,
    ),
    f"{_CHECKPOINT}.state_dict_saver": dict.fromkeys(
        ("save", "async_save", "save_state_dict", "_save_state_dict"), Purpose.CHECKPOINT_SAVED
    ),
    f"{_CHECKPOINT}.state_dict_loader": dict.fromkeys(
        ("load", "load_state_dict", "_load_state_dict"), Purpose.CHECKPOINT_LOADED
    ),
    "torch.distributed.tensor.parallel.loss": dict.fromkeys(
        ("_log_softmax", "_nll_loss_forward", "_nll_loss_and_log_softmax_backward"), Purpose.LOSS
    ),
    f"{_CONTEXT}._context_parallel._attention": _RING,
    f"{_CONTEXT}._attention": _RING,  # until torch 2.9
    "torch.utils.data.dataloader": {"_share_dist_seed": Purpose.RANDOM_STATE},
    "torchtitan.distributed.utils": {
        **dict.fromkeys(("dist_max", "dist_mean", "dist_sum"), Purpose.METRICS),
        "clip_grad_norm_": Purpose.GRADIENT_NORM,
    },
}
"""Module -> its functions. A function that this torch does not have is left out."""

_EXPORTING: Final = (_CHECKPOINT, "torch.nn.utils", "torch.distributed")
"""Packages that export some of these functions."""

_patches: Final[dict[str, Patches]] = {name: Patches() for name in MODULES}


def install() -> None:
    """Mark the functions of the modules that are imported."""
    for name, functions in MODULES.items():
        patches = _patches[name]
        if name in sys.modules and not patches:
            for function, purpose in functions.items():
                _wrap(patches, sys.modules[name], function, purpose)
            if name == _STATE_DICT:
                patches.wrap(sys.modules[name], "_init_optim_state", _without_step)


def uninstall() -> None:
    """Restore everything."""
    for patches in _patches.values():
        patches.undo()


def _wrap(patches: Patches, home: Any, name: str, purpose: Purpose) -> None:
    original = vars(home).get(name)
    if original is None:
        return
    marking = purposes.marking_unclaimed if purpose is Purpose.BARRIER else purposes.marking
    marked = marking(purpose)(original)
    if purpose is Purpose.LOSS:  # outside of modules, it would be in no phase
        marked = progress.wrapper(Phase.FORWARD)(marked)
    patches.replace(home, name, lambda _: _unless_compiling(original, marked))
    replacement = vars(home)[name]
    _rebind(original, replacement)
    patches.on_undo(_rebind, replacement, original)  # also where it was bound since: the package is still imported


def _unless_compiling(original: Callable[..., Any], marked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile sees through, with `fullgraph=True`, too: it would reject `Patches.wrap`."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        import torch  # may still be importing the modules above when they are hooked

        return original(*args, **kwargs) if torch.compiler.is_compiling() else marked(*args, **kwargs)

    return replacement


@around
def _without_step(original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
    """Ignore the step that only allocates an optimizer's state, before a checkpoint is loaded into it."""
    from .training import steps  # imports torch, which may still be importing the modules above

    with steps.suspended():
        original(*args, **kwargs)


def _rebind(old: Any, new: Any) -> None:
    """Replace a function in the packages that export it."""
    for package in [sys.modules[name] for name in _EXPORTING if name in sys.modules]:
        for name in [name for name, value in vars(package).items() if value is old]:
            setattr(package, name, new)
