"""Megatron-Core's schedules and optimizers, with stand-ins that call each other as those of Megatron-Core 0.16 do.

The stand-ins note each call as (name, step, phase, micro-batch).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from commtrace.current_step import progress  # noqa: E402
from commtrace.hooks import purposes  # noqa: E402
from commtrace.hooks.megatron import core_optimizer, core_schedules  # noqa: E402
from commtrace.schema import Phase  # noqa: E402

MESSAGES = """
class P2PCommunicator:
    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, batch=True):
        operations = [name for name, there in (
            ("send grad", tensor_send_prev is not None), ("recv", recv_prev),
            ("send", tensor_send_next is not None), ("recv grad", recv_next),
        ) if there]
        if batch:
            dist.batch_isend_irecv(operations)
        else:
            for operation in operations:
                communicate(operation)

def exchange(*names, batch=True):
    P2PCommunicator()._communicate(
        tensor_send_next=1 if "send" in names else None, tensor_send_prev=1 if "send grad" in names else None,
        recv_prev="recv" in names, recv_next="recv grad" in names, tensor_shape=(), batch=batch,
    )
"""
SCHEDULES = """
def forward_step(iterator, model, current_microbatch=None):
    communicate("tensor forward")

def backward_step(model):
    communicate("tensor backward")

def forward_backward_no_pipelining(*, model, num_microbatches, micro_batch_size, forward_only=False):
    for number in range(num_microbatches):
        forward_step(None, model, current_microbatch=number)
        if not forward_only:
            backward_step(model)
    communicate("reduce gradients")

def forward_backward_pipelining_without_interleaving(*, model, num_microbatches, micro_batch_size, forward_only=False):
    exchange("recv")
    forward_step(None, model, current_microbatch=0)
    exchange("send", "recv grad")
    backward_step(model)
    exchange("send grad", "recv", batch=False)

def forward_backward_pipelining_with_interleaving(*, model, num_microbatches, micro_batch_size, forward_only=False):
    backward_step(model)
"""
OPTIMIZERS = """
class MegatronOptimizer:
    def get_grad_norm(self):
        communicate("norm")

class FP32Optimizer(MegatronOptimizer):
    def step(self):
        communicate("norm")

class ChainedOptimizer:
    def __init__(self, parts):
        self.parts = parts
    def step(self):
        for part in self.parts:
            part.step()
        communicate("gather parameters")
"""
NAMES = {
    "pipeline_parallel.p2p_communication": MESSAGES,
    "pipeline_parallel.schedules": SCHEDULES,
    "optimizer.optimizer": OPTIMIZERS,
    "parallel_state": "def get_tensor_model_parallel_world_size(): return 2",
}
JOB = {"num_microbatches": 2, "micro_batch_size": 3}


class Stage(SimpleNamespace):
    """The definitions of the stand-ins, and the calls that they noted."""

    def noted(self) -> list[tuple[Any, ...]]:
        """Return the calls noted since the last call of this method."""
        noted, self.calls[:] = [*self.calls], []
        return noted


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    calls: list[tuple[Any, ...]] = []
    marked: list[tuple[str, str | None]] = []

    def communicate(what: str) -> None:
        calls.append((what, progress.step, progress.present_phase(), progress.micro_batch))
        marked.append((what, purposes.facts(purposes.current()).get("name")))

    def batch_isend_irecv(p2p_op_list: list[str]) -> None:
        assert isinstance(p2p_op_list, list)
        assert p2p_op_list[0]
        assert all(isinstance(operation, str) for operation in p2p_op_list)
        for operation in p2p_op_list:
            communicate(operation)

    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
    stage = Stage(calls=calls, marked=marked, communicate=communicate, dist=dist)
    for name, text in NAMES.items():
        module = ModuleType(f"megatron.core.{name}")
        vars(module).update(vars(stage))
        exec(text, vars(module))
        vars(stage).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    progress.reset()
    core_schedules.install()
    core_optimizer.install()
    schedules = vars(sys.modules["megatron.core.pipeline_parallel.schedules"])
    model = stage.model = torch.nn.Linear(2, 2)
    stage.run = lambda kind, **named: schedules[f"forward_backward_{kind}"](model=model, **JOB, **named)
    yield stage
    core_optimizer.uninstall()
    core_schedules.uninstall()
    progress.reset()
    assert vars(dist)["batch_isend_irecv"] is batch_isend_irecv


FORWARD, BACKWARD, OPTIMIZER, OTHER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER


def test_messages_are_of_the_pass_that_they_serve(stage: Stage) -> None:
    for step in range(2):
        stage.run("pipelining_without_interleaving")
        stage.FP32Optimizer().step()
        stage.communicate("log")
        assert stage.noted() == [
            ("recv", step, FORWARD, -1),
            ("tensor forward", step, FORWARD, 0),
            ("send", step, FORWARD, -1),
            ("recv grad", step, BACKWARD, -1),
            ("tensor backward", step, BACKWARD, 0),
            ("send grad", step, OTHER, -1),  # both directions, not in a batch
            ("recv", step, OTHER, -1),
            ("norm", step, OPTIMIZER, -1),
            ("log", step, OTHER, -1),
        ]


def test_messages_of_one_direction_and_of_batches_have_their_purposes(stage: Stage) -> None:
    stage.run("pipelining_without_interleaving")
    stage.FP32Optimizer().get_grad_norm()
    assert stage.marked == [
        ("recv", "pipeline activations"),
        ("tensor forward", None),
        ("send", "pipeline activations"),
        ("recv grad", "pipeline gradients"),
        ("tensor backward", None),
        ("send grad", None),  # both directions, not in a batch
        ("recv", None),
        ("norm", "gradient norm"),
    ]


def test_a_stage_without_calls_in_forward_begins_its_step_with_the_schedule(stage: Stage) -> None:
    stage.run("no_pipelining")
    assert progress.step == 0
    passes = [(what, 0, phase, number) for number in range(2) for what, phase in
              (("tensor forward", FORWARD), ("tensor backward", BACKWARD))]  # fmt: skip
    assert stage.noted() == [*passes, ("reduce gradients", 0, BACKWARD, -1)]


def test_which_micro_batch_an_interleaved_schedule_propagates_is_not_known(stage: Stage) -> None:
    stage.run("pipelining_with_interleaving")
    assert stage.noted() == [("tensor backward", 0, BACKWARD, -1)]


def test_passes_that_run_together_are_left_to_autograd_and_the_frames(stage: Stage) -> None:
    stage.model.config = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    stage.run("no_pipelining")
    assert stage.noted()[-1] == ("reduce gradients", 0, OTHER, -1)


def test_an_evaluation_is_one_phase_and_begins_no_step(stage: Stage) -> None:
    stage.run("pipelining_without_interleaving")
    stage.FP32Optimizer().step()
    stage.noted()
    stage.run("pipelining_without_interleaving", forward_only=True)
    assert {call[1:] for call in stage.noted()} == {(0, Phase.EVALUATION, -1)}


def test_a_chain_of_optimizers_ends_one_step(stage: Stage) -> None:
    stage.run("no_pipelining")
    stage.noted()
    stage.ChainedOptimizer([stage.FP32Optimizer(), stage.FP32Optimizer()]).step()
    assert stage.noted() == [("norm", 0, OPTIMIZER, -1)] * 2 + [("gather parameters", 0, OPTIMIZER, -1)]
    stage.run("no_pipelining")
    assert progress.step == 1


def test_the_job_has_sizes_and_parameters(stage: Stage) -> None:
    stage.run("no_pipelining")
    (row,) = core_schedules._rows.values()
    assert (row.source, row.engine, row.tensor_parallel_size) == ("megatron", "Linear", 2)
    assert row.gradient_accumulation_steps == 2
    assert [parameter.shape for parameter in row.parameters] == [[2, 2], [2]]
    assert not row.has(type(row).pipeline_stages)  # the stand-in has no such function
