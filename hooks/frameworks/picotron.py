"""Roles of the groups of picotron, which its calls use: all of them are lines of the program itself."""

from __future__ import annotations

from commtrace.hooks.torch.group_registry import Registry

_registry = Registry(
    "picotron.process_group_manager",
    "setup_process_group_manager",
    {
        "tp_group": "tensor",
        "cp_group": "context",
        "pp_group": "pipeline",
        "dp_group": "data",
        "cp_dp_group": "data",  # gradients are reduced among it
    },
    holder="process_group_manager",
)
install, uninstall = _registry.install, _registry.uninstall
