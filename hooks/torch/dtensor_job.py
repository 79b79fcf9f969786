"""Parallel styles that `parallelize_module` applied to the modules of a model, for the job row."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from commtrace.job_row import JobRow, StyleRow
from commtrace.reading.roles_by_name import role_of_dimension

from .model_facts import architecture, available, buffers, common, parameters


class ParallelizedModules:
    """Arguments of `parallelize_module` by module, kept weakly: modules belong to the program."""

    def __init__(self) -> None:
        self.styles: weakref.WeakKeyDictionary[Any, tuple[Any, Any, bool]] = weakref.WeakKeyDictionary()
        """(style, mesh, whether parameters were sent from the first rank) by module."""
        self.rows: weakref.WeakKeyDictionary[Any, JobRow] = weakref.WeakKeyDictionary()
        self.styles_seen = 0
        """Number of styles at the last search for the root module."""
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = 0

    def clear(self) -> None:
        """Remove all modules."""
        self.styles.clear()
        self.rows.clear()
        self._roots.clear()
        self.styles_seen = 0

    @contextlib.contextmanager
    def within(self, module: Any) -> Iterator[None]:
        """Enter a (recursive) call of `parallelize_module`: only the outermost module is a root."""
        if not self._depth:
            self._roots.add(module)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def record_style(self, module: Any, mesh: Any, plan: Any, source: Any) -> None:
        """Record a module's style after a call; for a plan with names, inner calls have done so."""
        if plan is not None and not isinstance(plan, dict):
            self.styles[module] = (plan, mesh, source is not None)

    def root(self) -> Any:
        """Return the module that contains all parallelized modules; None if there is none."""
        return next((root for root in [*self._roots] if {*self.styles} <= {*root.modules()}), None)


parallelized_modules = ParallelizedModules()


def describe(root: Any, optimizer: Any) -> JobRow:
    """Return the `job` row of a model that is only tensor-parallel. Never raises."""
    return JobRow(
        source="dtensor",
        engine="parallelize_module",
        data_parallel_size=1,
        tensor_parallel_size=available(lambda: tensor_parallel_size(root)),
        tensor_plan=available(lambda: tensor_plan(root)),
        optimizer=available(lambda: type(optimizer).__name__),
        foreach=available(lambda: common({group.get("foreach") for group in optimizer.param_groups})),
        parameters=available(lambda: parameters(root)),
        buffers=available(lambda: buffers(root)),
        model=available(lambda: architecture(root)),
    )


def tensor_parallel_size(root: Any) -> int:
    """Return the number of tensor-parallel ranks. Raises ValueError without any."""
    sizes = {parallelized_modules.styles[module][1].size() for _, module in _styled_modules(root)}
    return int(common(sizes))


def tensor_plan(root: Any) -> list[StyleRow]:
    """Return the tensor-parallel modules. Raises LookupError without any."""
    plan = [_style(name, module) for name, module in _styled_modules(root)]
    if not plan:
        raise LookupError
    return plan


def _styled_modules(root: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in root.named_modules() if module in parallelized_modules.styles]


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the roles of the meshes' groups: by the dimension's name (experts are parallelized, too), else tensor."""
    for _, mesh, _ in [*parallelized_modules.styles.values()]:
        if mesh is not None:  # None: the mesh is from the program's context manager
            names = mesh.mesh_dim_names or ("",)
            role = role_of_dimension(names[0]) or "tensor"
            yield mesh.get_group(), role, "torch.distributed.tensor.parallel.parallelize_module"


def _style(name: str, module: Any) -> StyleRow:
    style, _, sent = parallelized_modules.styles[module]
    return StyleRow(
        module=name,
        style=type(style).__name__,
        inputs=_layout(style, "input_layouts"),
        desired=_layout(style, "desired_input_layouts"),
        outputs=_layout(style, "output_layouts"),
        local=bool(getattr(style, "use_local_output", True)),
        embedding=hasattr(module, "num_embeddings"),
        weight=_shape(module, "weight"),
        bias=_shape(module, "bias"),
        sent=sent,
    )


def _layout(style: Any, name: str) -> list[str]:
    """Return placements as "Replicate" or "Shard(1)"."""
    placements = [placement for placement in getattr(style, name, None) or () if placement is not None]
    return [f"Shard({placement.dim})" if placement.is_shard() else type(placement).__name__ for placement in placements]


def _shape(module: Any, name: str) -> list[int] | None:
    """Return the full shape of one of the module's own parameters."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    return None if parameter is None else [int(size) for size in parameter.shape]
