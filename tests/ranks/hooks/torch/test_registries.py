"""Roles from registries of Megatron-LM, GPT-NeoX and picotron: stand-ins with the names of their modules and groups."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import trainings

from commtrace.run import open_run

# Global of the module -> groups; each rank keeps its own group, in a list where it may have several.
CORE = {
    "_TENSOR_MODEL_PARALLEL_GROUP": [[0, 1], [2, 3]],
    "_CONTEXT_PARALLEL_GROUP": [[0, 2], [1, 3]],
    "_EXPERT_MODEL_PARALLEL_GROUP": [[0, 3], [1, 2]],
    "_DATA_PARALLEL_GROUP_WITH_CP": [[0, 1, 2, 3]],
    "_PIPELINE_MODEL_PARALLEL_GROUP": [[0, 1, 2], [3]],
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": [[0, 1, 3], [2]],
    "_MODEL_PARALLEL_GROUP": [[0, 2, 3], [1]],
}
NEOX = {
    "_MODEL_PARALLEL_GROUP": [[0, 1], [2, 3]],
    "_PIPE_PARALLEL_GROUP": [[0, 2], [1, 3]],
    "_CONTEXT_PARALLEL_GROUP": [[0, 3], [1, 2]],
    "_DATA_PARALLEL_GROUP": [[0, 1, 2, 3]],
}
MANAGER = """
import torch.distributed as dist

class ProcessGroupManager:
    def __init__(self):
        self.cp_group, _ = [dist.new_group(ranks) for ranks in ([1, 2, 3], [0])][:: -1 if dist.get_rank() == 0 else 1]

def setup_process_group_manager():
    global process_group_manager
    process_group_manager = ProcessGroupManager()
"""
LISTS = ("_PIPELINE_MODEL_PARALLEL_GROUP", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")
STAND_INS = {"core/parallel_state": CORE, "mpu/initialize": NEOX}

EXPECTED = {
    *(("0-1", "tensor"), ("2-3", "tensor"), ("0,2", "context"), ("1,3", "context")),
    *(("0,3", "expert"), ("1-2", "expert"), ("0-3", "data"), ("0-2", "pipeline"), ("0-1,3", "context")),
    *(("0,2-3", "model"), ("1", "self"), ("2", "self"), ("3", "self")),
    *(("0,2", "pipeline"), ("1,3", "pipeline"), ("0,3", "context"), ("1-2", "context")),
    *(("1-3", "context"), ("0", "self")),
}


def stand_in(made: dict[str, list[list[int]]]) -> str:
    """Return the source of a module that makes groups as the real one does: all ranks make all, and keep their own."""
    lines = [
        "import torch.distributed as dist",
        *(f"{name} = None" for name in made),
        "def initialize_model_parallel():",
    ]
    for name, groups in made.items():
        lines += [
            f"    global {name}",
            f"    groups = [(ranks, dist.new_group(ranks)) for ranks in {groups}]",
            f"    {name} = {'[' * (name in LISTS)}next(group for ranks, group in groups if dist.get_rank() in ranks)"
            f"{']' * (name in LISTS)}",
        ]
    return "\n".join(lines) + "\n"


def test_roles_are_those_of_the_registries(tmp_path: Path) -> None:
    for path, made in STAND_INS.items():
        module = tmp_path / "modules" / "megatron" / f"{path}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        for folder in (module.parent, module.parent.parent):
            (folder / "__init__.py").touch()
        module.write_text(stand_in(made))
    manager = tmp_path / "modules" / "picotron" / "process_group_manager.py"
    manager.parent.mkdir()
    (manager.parent / "__init__.py").touch()
    manager.write_text(MANAGER)
    log = tmp_path / "log"
    started = trainings.parent().start(
        "registries", tmp_path / "none", tmp_path / "modules", log, ranks=4, traced=False
    )
    assert started.wait() == [0] * 4, started.output(0)[-4000:]
    events = open_run(log).events()
    roles = {*zip(events["group_ranks"], events["role"], strict=True)}
    assert roles == EXPECTED
