"""One run: training steps on every rank, compared with one process if requested.

Every run is a pipeline. With `--parallel pipeline` every rank is a stage; otherwise all ranks share a single stage.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import commtrace
from examples.mpi_common.errors import TransportError
from examples.mpi_common.iterations import RankResult, digest, relative_difference, report, run_iterations
from examples.mpi_common.options import DTYPES, choose_device, make_transport
from examples.mpi_common.transports import Transport

from .layers import EncoderLayer, EncoderShape, Ways, classifier, loss_of, update, whole_layer
from .options import parse, shape_of
from .reference import EncoderReference
from .schedules import SCHEDULES

LEARNING_RATE = 0.1


class EncoderRun:
    """Layers of this rank, and the input and labels, which are the same in every step."""

    def __init__(self, options: Namespace, transport: Transport, device: torch.device) -> None:
        self.options, self.shape, self.transport = options, shape_of(options), transport
        pipelined = options.parallel == "pipeline"
        self.stage, self.stages = (transport.rank, transport.size) if pipelined else (0, 1)
        self.ways = divide(self.shape, options.parallel, transport)
        dtype = DTYPES[options.dtype]
        self.layers = [self._layer(index, dtype, device) for index in self._indices()]
        self.head = classifier(self.shape, options.seed).to(device, dtype) if self._last else None
        self.inputs, self.labels = make_data(options, self.shape, dtype, device)
        self.schedule = SCHEDULES[options.schedule](self.stage, self.stages, self.shape.micro_batches)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.logits: dict[int, torch.Tensor] = {}
        self.input_gradients: dict[int, torch.Tensor] = {}

    @property
    def _first(self) -> bool:
        return self.stage == 0

    @property
    def _last(self) -> bool:
        return self.stage == self.stages - 1

    def _indices(self) -> range:
        each = self.shape.layers // self.stages
        return range(self.stage * each, (self.stage + 1) * each)

    def _layer(self, index: int, dtype: torch.dtype, device: torch.device) -> EncoderLayer:
        whole = whole_layer(self.shape, self.options.seed, index).to(device, dtype)
        return EncoderLayer(whole, index, self.shape, self.options.dropout, self.ways)

    def iterate(self, step: int) -> torch.Tensor:
        """Run one training step; return the mean loss of the batch on ranks with the last layer, 0 on others."""
        for _, parameter in self.named_parameters():
            parameter.grad = None
        loss = self.inputs.new_zeros(())
        for task in self.schedule:
            if task.forward:
                loss += self._forward(task.micro_batch, step)
            elif not self.options.forward_only:
                self._backward(task.micro_batch)
        self._kept.clear()
        if self.stages > 1:
            self.transport.flush()
        if not self.options.forward_only:
            with commtrace.phase("optimizer"):
                update([p for _, p in self.named_parameters()], LEARNING_RATE)
        return loss

    def _forward(self, number: int, step: int) -> torch.Tensor:
        """Return the micro-batch's summand of the loss."""
        with commtrace.phase("forward"), torch.set_grad_enabled(not self.options.forward_only):
            rows = self.inputs.shape[0] // self.shape.micro_batches
            x = self.inputs[number * rows : (number + 1) * rows]
            if not self._first:
                x = self.transport.recv(x, self.stage - 1)
            x = y = x.detach().requires_grad_(not self.options.forward_only)
            for layer in self.layers:
                y = layer(y, step, number * rows)
            if self.head is None:
                self.transport.send(y, self.stage + 1)
                self._kept[number] = x, y
                return y.new_zeros(())
            logits = self.head(y)
            loss = loss_of(logits, self.labels[number * rows : (number + 1) * rows]) / self.shape.micro_batches
            self.logits[number] = logits.detach()
            self._kept[number] = x, loss
            return loss.detach()

    def _backward(self, number: int) -> None:
        with commtrace.phase("backward"):
            x, y = self._kept.pop(number)
            torch.autograd.backward(y, None if self._last else self.transport.recv(y, self.stage + 1))
            assert x.grad is not None
            if self._first:
                self.input_gradients[number] = x.grad
            else:
                self.transport.send(x.grad, self.stage - 1)

    def results(self) -> dict[str, torch.Tensor]:
        """Return this rank's results of the last step, by name: logits, input gradient, parameters and their gradients.

        Names of parameters begin with the number of the layer.
        """
        tensors = {
            name: torch.cat([by_number[number] for number in sorted(by_number)])
            for name, by_number in (("logits", self.logits), ("input gradient", self.input_gradients))
            if by_number
        }
        for name, parameter in self.named_parameters():
            tensors[name] = parameter.detach()
            if parameter.grad is not None:
                tensors[f"{name} gradient"] = parameter.grad
        return tensors

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters by name, for example "2.linear1.weight" or "head.bias"."""
        layers = [(f"{layer.index}.{name}", p) for layer in self.layers for name, p in layer.parameters.items()]
        head = [] if self.head is None else [(f"head.{name}", p) for name, p in self.head.named_parameters()]
        return layers + head


def divide(shape: EncoderShape, parallel: str, transport: Transport) -> Ways:
    """Return how a layer is divided. Collective: all ranks call it."""
    if parallel == "pipeline":
        alone = transport.blocks(1)
        return Ways(alone, alone, gathered=False)
    of_head = transport.blocks(max(1, transport.size // shape.heads))
    return Ways(transport, of_head, gathered=parallel == "model")


def make_data(
    options: Namespace, shape: EncoderShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs (b, s, m) and labels (b, s), the same on every rank."""
    generator = torch.Generator().manual_seed(options.seed)
    inputs = torch.randn(shape.batch, shape.sequence, shape.model, generator=generator)
    labels = torch.randint(shape.classes, (shape.batch, shape.sequence), generator=generator)
    return inputs.to(device, dtype), labels.to(device)


def check(run: EncoderRun) -> float:
    """Return the largest relative difference from torch's own layers in one process."""
    options = run.options
    reference = EncoderReference(run.shape, options.seed, options.dropout, run.inputs, run.labels)
    for step in range(options.warmup + options.iterations):
        reference.step(step, None if options.forward_only else LEARNING_RATE)
    expected, measured = reference.results(), run.results()
    pieces = {f"{layer.index}.{name}": piece for layer in run.layers for name, piece in layer.pieces.items()}
    return max(
        relative_difference(tensor, pieces.get(name.removesuffix(" gradient"), torch.clone)(expected[name]))
        for name, tensor in measured.items()
    )


def train(options: Namespace, transport: Transport, device: torch.device) -> tuple[RankResult, EncoderRun]:
    """Run all steps of this rank."""
    torch.set_num_threads(options.threads)
    run = EncoderRun(options, transport, device)
    losses = run_iterations(run.iterate, transport, options.warmup + options.iterations)
    result = RankResult(losses, digest(run.results().values()))
    if options.check:
        result.error = check(run)
    return result, run


def command(argv: Sequence[str], comm: Any) -> int:
    """Run the command on one rank. All options are checked before anything starts."""
    rank, size = comm.Get_rank(), comm.Get_size()
    options = parse(argv, rank)
    shape = shape_of(options)
    shape.check(options.parallel, size)
    if options.parallel == "pipeline" and options.transport == "nccl":
        raise TransportError("--parallel pipeline sends both ways at once, and NCCL's queues would block each other; "
                             "use --transport mpi, mpi-cuda-aware or gloo")  # fmt: skip
    device = choose_device(options.device, rank)
    transport = make_transport(options.transport, comm, device)
    own, _ = train(options, transport, device)
    transport.close()
    mode = options.parallel if options.parallel != "pipeline" else f"pipeline ({options.schedule})"
    return report(comm, own, f"encoder, {mode}", options)
