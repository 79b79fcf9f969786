"""Call sites: which functions are wrappers, and which have the line that a report names."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commtrace.hooks import call_site


def code(path: str, function: str) -> CodeType:
    """Return the code object of a function in a file."""
    module = compile(f"def {function}(): pass", path, "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


@pytest.mark.parametrize(
    ("path", "function", "passes_on"),
    [
        ("torch/distributed/distributed_c10d.py", "all_reduce", True),
        ("torch/nn/utils/clip_grad.py", "_get_total_norm", True),
        ("torch/utils/_device.py", "__torch_function__", True),
        ("deepspeed/comm/comm.py", "all_reduce", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "_dist_allgather_fn", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "all_gather_coalesced", False),
        ("deepspeed/runtime/comm/coalesced_collectives.py", "_torch_reduce_scatter_fn", True),
        ("deepspeed/runtime/comm/coalesced_collectives.py", "reduce_scatter_coalesced", False),
        ("deepspeed/runtime/engine.py", "allreduce_bucket", False),
        ("megatron/core/pipeline_parallel/p2p_communication.py", "_batched_p2p_ops", True),
        ("megatron/core/pipeline_parallel/schedules.py", "backward_step", False),
        ("transformers/trainer.py", "train", False),
    ],
)
def test_wrappers_are_passed_over(path: str, function: str, passes_on: bool) -> None:
    kind = call_site._classify(code(f"/opt/env/lib/python3.11/site-packages/{path}", function))
    assert bool(kind & call_site.WRAPPER) == passes_on


MAPPINGS = """
def call(): return find()
def reduce(): return call()
class Copy:
    def backward(): return call()
"""


class Tables:
    lookups = 0

    def row_id(self, table: str, values: tuple[Any, ...], row: Callable[[], dict[str, Any]]) -> int:
        self.row = row()
        return 1


@pytest.mark.parametrize("folder", ["/home/me/gpt-neox/megatron/mpu", "/lib/megatron/core/tensor_parallel"])
def test_a_helper_of_many_lines_is_named_with_its_caller(folder: str) -> None:
    tables = Tables()
    sites = call_site.CallSites(tables)  # type: ignore[arg-type]
    mappings: dict[str, Any] = {"find": lambda: sites.find(1, deep=False)}
    exec(compile(MAPPINGS, f"{folder}/mappings.py", "exec"), mappings)
    for _ in range(2):
        mappings["reduce"]()
        assert (tables.row["line"], tables.row["function"]) == (2, "call")
        assert tables.row["caller"]["file"] == __file__
    mappings["Copy"].backward()
    assert (tables.row["function"], tables.row["caller"]["line"]) == ("call", 5)


def test_a_program_s_own_file_is_never_passed_over() -> None:
    assert not call_site._classify(code("/home/me/torch/utils/_device.py", "main")) & call_site.WRAPPER


def test_the_outermost_module_shows_whether_a_pass_trains() -> None:
    """Parts of a compiled program are always in training mode, and an engine's own flag is not its model's."""
    modules = [SimpleNamespace(training=value) for value in (False, True)]
    compiled = type("Lambda", (SimpleNamespace,), {"__module__": "torch.fx.graph_module"})(training=True)
    engine = SimpleNamespace(training=True, _modules={"module": modules[0]})
    assert call_site.in_training([modules[1], modules[0]])
    assert not call_site.in_training([modules[0], modules[1]])
    assert not call_site.in_training([compiled, modules[0], modules[1]])
    assert not call_site.in_training([engine, modules[1]])
    assert not call_site.in_training([compiled])
    assert not call_site.in_training([None])
    assert not call_site.in_training([])
