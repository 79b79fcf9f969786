"""What one process computes with torch's own layer: that which every rank's results are compared with."""

from __future__ import annotations

import torch
from torch import nn

from commtrace.workloads.mpi.dropout import Dropout
from commtrace.workloads.mpi.transports import Transport

from .layer import Layer, Shape, loss_of


class Reference:
    """nn.TransformerEncoderLayer with the parameters of a Layer; only its dropout is ours, for the same masks."""

    def __init__(self, layer: Layer, rate: float) -> None:
        shape = layer.shape
        self.module = nn.TransformerEncoderLayer(
            shape.hidden, shape.heads, shape.feed_forward, 0.0, "gelu", batch_first=True, norm_first=True
        ).to(layer.query.weight)
        self.drops = Dropout(rate), Dropout(rate)
        self.module.dropout1, self.module.dropout2 = self.drops  # type: ignore[assignment]
        state = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
        for kind in ("weight", "bias"):
            state[f"self_attn.in_proj_{kind}"] = torch.cat(
                [state.pop(f"{part}.{kind}") for part in ("query", "key", "value")]
            )
            state[f"self_attn.out_proj.{kind}"] = state.pop(f"output.{kind}")
        self.module.load_state_dict(state)

    def results(self, whole: torch.Tensor, shape: Shape, step: int, transport: Transport) -> dict[str, torch.Tensor]:
        """What `Run.results` should be on the rank of `transport`."""
        for number, drop in enumerate(self.drops):
            drop.key = 2 * step + number
        with torch.set_grad_enabled(whole.requires_grad):
            y = self.module(whole)
        found = {"output": y.detach().chunk(transport.size, 1)[transport.rank]}
        if not whole.requires_grad:
            return found
        loss_of(y, shape).backward()  # type: ignore[no-untyped-call]
        assert whole.grad is not None
        found["input"] = whole.grad.chunk(transport.size, 1)[transport.rank]
        return found | self._gradients()

    def _gradients(self) -> dict[str, torch.Tensor]:
        """By the names that the parameters have in Layer."""
        found = {}
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None
            kind = name.rpartition(".")[2].removeprefix("in_proj_")
            if "in_proj" in name:
                for part, gradient in zip(("query", "key", "value"), parameter.grad.chunk(3), strict=True):
                    found[f"{part}.{kind}"] = gradient
            else:
                found[name.replace("self_attn.out_proj", "output")] = parameter.grad
        return found
