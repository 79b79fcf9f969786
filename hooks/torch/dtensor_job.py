"""The parallel style that `parallelize_module` gave each module of a model, in the model's order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from .model_facts import common, known, model_row


class Cuts:
    """Arguments of `parallelize_module` by module, kept weakly: modules belong to the program."""

    def __init__(self) -> None:
        self.styles: weakref.WeakKeyDictionary[Any, tuple[Any, Any, bool]] = weakref.WeakKeyDictionary()
        """(style, mesh, whether parameters were sent from the first rank) of a module."""
        self.rows: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.styles_seen = 0
        """Number of styles when the root module was last looked for."""
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = 0

    def clear(self) -> None:
        """Forget everything."""
        self.styles.clear()
        self.rows.clear()
        self._roots.clear()
        self.styles_seen = 0

    @contextlib.contextmanager
    def within(self, module: Any) -> Iterator[None]:
        """Enter a call, which calls itself for the modules of a plan: only the outermost module is a root."""
        if not self._depth:
            self._roots.add(module)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note(self, module: Any, mesh: Any, plan: Any, source: Any) -> None:
        """Note the style of a module after a call. A plan with names has noted its modules by itself."""
        if plan is not None and not isinstance(plan, dict):
            self.styles[module] = (plan, mesh, source is not None)

    def root(self) -> Any:
        """Return the module that contains all parallelized modules; None if there is none."""
        return next((root for root in [*self._roots] if {*self.styles} <= {*root.modules()}), None)


cuts = Cuts()


def describe(root: Any, optimizer: Any) -> dict[str, Any]:
    """Return the `job` row of a model that is only tensor-parallel. Never raises."""
    return {
        "source": "dtensor",
        "engine": "parallelize_module",
        "data_parallel_size": 1,
        **cut(root),
        **known(
            {
                "optimizer": lambda: type(optimizer).__name__,
                "foreach": lambda: common({group.get("foreach") for group in optimizer.param_groups}),
            }
        ),
        **model_row(root),
    }


def cut(root: Any) -> dict[str, Any]:
    """Return how a model is divided, for its job row; empty if it is not. Never raises."""
    styled = [(name, module) for name, module in root.named_modules() if module in cuts.styles]
    if not styled:
        return {}
    return known(
        {
            "tensor_parallel_size": lambda: common({cuts.styles[module][1].size() for _, module in styled}),
            "tensor_plan": lambda: [_style(name, module) for name, module in styled],
        }
    )


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the roles of the meshes' groups."""
    for _, mesh, _ in [*cuts.styles.values()]:
        if mesh is not None:  # None: the mesh of the program's context manager
            yield mesh.get_group(), "tensor", "torch.distributed.tensor.parallel.parallelize_module"


def _style(name: str, module: Any) -> dict[str, Any]:
    style, _, sent = cuts.styles[module]
    return {
        "module": name,
        "style": type(style).__name__,
        "inputs": _layout(style, "input_layouts"),
        "desired": _layout(style, "desired_input_layouts"),
        "outputs": _layout(style, "output_layouts"),
        "local": bool(getattr(style, "use_local_output", True)),
        "embedding": hasattr(module, "num_embeddings"),
        "weight": _shape(module, "weight"),
        "bias": _shape(module, "bias"),
        "sent": sent,
    }


def _layout(style: Any, name: str) -> list[str]:
    """Return placements as "Replicate" or "Shard(1)"."""
    placements = [placement for placement in getattr(style, name, None) or () if placement is not None]
    return [f"Shard({placement.dim})" if placement.is_shard() else type(placement).__name__ for placement in placements]


def _shape(module: Any, name: str) -> list[int] | None:
    """Return the full shape of one of the module's own parameters."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    return None if parameter is None else [int(size) for size in parameter.shape]
