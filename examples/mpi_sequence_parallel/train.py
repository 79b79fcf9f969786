"""One run: iterations of the layer on every rank, compared with one process if requested."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

import commtrace
from examples.mpi_common.iterations import RankResult, digest, relative_difference, report, run_iterations
from examples.mpi_common.options import DTYPES, choose_device, make_transport
from examples.mpi_common.transports import Transport

from .layer import Layer, SequenceShape, loss_of
from .options import parse, shape_of
from .reference import SequenceReference


class SequenceRun:
    """Layer and this rank's part of the input, which is the same in every iteration."""

    def __init__(self, options: Namespace, transport: Transport, device: torch.device) -> None:
        self.shape = shape_of(options)
        self.transport = transport
        self.forward_only: bool = options.forward_only
        self.layer = make_layer(options, transport).to(device, DTYPES[options.dtype])
        whole = make_input(options, self.shape).to(DTYPES[options.dtype])
        self.x = whole.chunk(transport.size, 1)[transport.rank].to(device).requires_grad_(not self.forward_only)
        self.y = self.x.detach()

    def iterate(self, step: int) -> torch.Tensor:
        """Run forward and, by default, backward with summed gradients; return this rank's loss."""
        with commtrace.phase("forward"), torch.set_grad_enabled(not self.forward_only):
            y = self.layer(self.x, step)
            loss = loss_of(y, self.shape)
        self.y = y.detach()
        if self.forward_only:
            return loss
        self.layer.zero_grad()
        self.x.grad = None
        with commtrace.phase("backward"):
            loss.backward()
            self.layer.add_up_gradients()
        return loss.detach()

    def results(self) -> dict[str, torch.Tensor]:
        """Return the last output, the input's gradient and the parameters' gradients of this rank, by name."""
        tensors = {"output": self.y}
        if self.x.grad is not None:
            tensors["input"] = self.x.grad
        for name, parameter in self.layer.named_parameters():
            if parameter.grad is not None:
                tensors[name] = parameter.grad
        return tensors


def make_layer(options: Namespace, transport: Transport) -> Layer:
    """Create the layer with the same parameters on every rank."""
    torch.manual_seed(options.seed)
    return Layer(shape_of(options), options.attention, options.dropout, transport)


def make_input(options: Namespace, shape: SequenceShape) -> torch.Tensor:
    """Return the complete input (b, s, h), the same on every rank."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    return torch.randn(shape.batch, shape.sequence, shape.hidden, generator=generator)


def check(run: SequenceRun, options: Namespace) -> float:
    """Return the largest relative difference from torch's own layer in one process."""
    reference = SequenceReference(run.layer, options.dropout)
    whole = make_input(options, run.shape).to(run.x).requires_grad_(not run.forward_only)
    last = options.warmup + options.iterations - 1
    expected = reference.results(whole, run.shape, last, run.transport)
    measured = run.results()
    assert measured.keys() == expected.keys()
    return max(relative_difference(measured[name], expected[name]) for name in measured)


def train(options: Namespace, transport: Transport, device: torch.device) -> tuple[RankResult, SequenceRun]:
    """Run all iterations of this rank."""
    torch.set_num_threads(options.threads)
    run = SequenceRun(options, transport, device)
    losses = run_iterations(run.iterate, transport, options.warmup + options.iterations)
    result = RankResult(losses, digest(run.results().values()))
    if options.check:
        result.error = check(run, options)
    return result, run


def command(argv: Sequence[str], comm: Any) -> int:
    """Run the command on one rank. All options are checked before anything starts."""
    rank, size = comm.Get_rank(), comm.Get_size()
    options = parse(argv, rank)
    shape = shape_of(options)
    shape.check(size, options.attention)
    device = choose_device(options.device, rank)
    transport = make_transport(options.transport, comm, device)
    own, _ = train(options, transport, device)
    transport.close()
    return report(comm, own, f"sequence_parallel, {options.attention}", options)
