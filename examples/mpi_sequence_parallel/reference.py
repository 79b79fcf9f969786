"""Reference results of one process with torch's own layer."""

from __future__ import annotations

import torch
from torch import nn

from examples.mpi_common.dropout import Dropout
from examples.mpi_common.transports import Transport

from .layer import Layer, SequenceShape, loss_of


class SequenceReference:
    """nn.TransformerEncoderLayer with the parameters of a Layer, and `Dropout` in place of torch's, for equal masks."""

    def __init__(self, layer: Layer, rate: float) -> None:
        shape = layer.shape
        self.module = nn.TransformerEncoderLayer(
            shape.hidden, shape.heads, shape.feed_forward, 0.0, "gelu", batch_first=True, norm_first=True
        ).to(layer.output.weight)
        self.drops = Dropout(rate), Dropout(rate)
        self.module.dropout1, self.module.dropout2 = self.drops  # type: ignore[assignment]
        self.module.load_state_dict({_torch_name(name): value for name, value in layer.state_dict().items()})
        self.names = {_torch_name(name): name for name, _ in layer.named_parameters()}

    def results(
        self, whole: torch.Tensor, shape: SequenceShape, step: int, transport: Transport
    ) -> dict[str, torch.Tensor]:
        """Return the expected `SequenceRun.results` of the rank of `transport`."""
        for number, drop in enumerate(self.drops):
            drop.key = 2 * step + number
        with torch.set_grad_enabled(whole.requires_grad):
            y = self.module(whole)
        tensors = {"output": y.detach().chunk(transport.size, 1)[transport.rank]}
        if not whole.requires_grad:
            return tensors
        loss_of(y, shape).backward()
        assert whole.grad is not None
        tensors["input"] = whole.grad.chunk(transport.size, 1)[transport.rank]
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None
            tensors[self.names[name]] = parameter.grad
        return tensors


def _torch_name(name: str) -> str:
    """Return the name in nn.TransformerEncoderLayer of a parameter of Layer."""
    return name.replace("query_key_value.", "self_attn.in_proj_").replace("output.", "self_attn.out_proj.")
