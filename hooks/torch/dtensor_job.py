"""How `parallelize_module` cut a model: the style of each module, in the order in which the model has them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from .model_facts import architecture, buffers, common, known, parameters


class Cuts:
    """What was given to `parallelize_module`. Kept weakly: modules belong to the program."""

    def __init__(self) -> None:
        self.styles: weakref.WeakKeyDictionary[Any, tuple[Any, Any, bool]] = weakref.WeakKeyDictionary()
        """(style, mesh, whether parameters were sent from the first rank) of a module."""
        self.rows: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.looked_at = 0
        """Styles that there were when somebody last looked for the module that has them all."""
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = 0

    def clear(self) -> None:
        """Forget everything."""
        self.styles.clear()
        self.rows.clear()
        self._roots.clear()
        self.looked_at = 0

    @contextlib.contextmanager
    def within(self, module: Any) -> Iterator[None]:
        """While a call is under way: it calls itself for the modules of a plan."""
        if not self._depth:
            self._roots.add(module)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note(self, module: Any, mesh: Any, plan: Any, source: Any) -> None:
        """A call has ended. A plan with names has noted its modules by itself."""
        if plan is not None and not isinstance(plan, dict):
            self.styles[module] = (plan, mesh, source is not None)

    def root(self) -> Any:
        """The module that has all of those that were cut; None where there is none."""
        return next((one for one in [*self._roots] if {*self.styles} <= {*one.modules()}), None)


cuts = Cuts()


def describe(root: Any, optimizer: Any) -> dict[str, Any]:
    """One row of the `job` table, of a model that is tensor-parallel alone. Never raises."""
    return {
        "source": "dtensor",
        "engine": "parallelize_module",
        "data_parallel_size": 1,
        **cut(root),
        **known(
            {
                "optimizer": lambda: type(optimizer).__name__,
                "foreach": lambda: common({group.get("foreach") for group in optimizer.param_groups}),
                "parameters": lambda: parameters(root),
                "buffers": lambda: buffers(root),
                "model": lambda: architecture(root),
            }
        ),
    }


def cut(root: Any) -> dict[str, Any]:
    """How a model is cut, for its job row; nothing where it is not. Never raises."""
    some = [(name, one) for name, one in root.named_modules() if one in cuts.styles]
    if not some:
        return {}
    return known(
        {
            "tensor_parallel_size": lambda: common({cuts.styles[one][1].size() for _, one in some}),
            "tensor_plan": lambda: [_style(name, one) for name, one in some],
        }
    )


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Those of the meshes."""
    for _, mesh, _ in [*cuts.styles.values()]:
        if mesh is not None:  # else that of a context manager of the program
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
    """ "Replicate", "Shard(1)": as short as they can be told."""
    found = getattr(style, name, None) or ()
    return [f"Shard({one.dim})" if one.is_shard() else type(one).__name__ for one in found if one is not None]


def _shape(module: Any, name: str) -> list[int] | None:
    """Of a parameter of the module's own, whole."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    return None if parameter is None else [int(size) for size in parameter.shape]
