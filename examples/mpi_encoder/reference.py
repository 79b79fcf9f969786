"""Reference results of one process with torch's own layers."""

from __future__ import annotations

import torch

from examples.mpi_common.dropout import Dropout

from .layers import EncoderShape, classifier, dropout_key, loss_of, update, whole_layer


class EncoderReference:
    """Stack of nn.TransformerEncoderLayer and the classifier, with `Dropout` in place of torch's, for equal masks."""

    def __init__(self, shape: EncoderShape, seed: int, rate: float, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.layers = [whole_layer(shape, seed, index).to(inputs) for index in range(shape.layers)]
        self.head = classifier(shape, seed).to(inputs)
        self.inputs, self.labels = inputs.clone().requires_grad_(), labels
        self.drops = [(Dropout(rate), Dropout(rate)) for _ in self.layers]
        for layer, drops in zip(self.layers, self.drops, strict=True):
            layer.dropout1, layer.dropout2 = drops  # type: ignore[assignment]
        self.logits = inputs

    def step(self, number: int, rate: float | None) -> None:
        """Run forward and, with a learning rate, backward and an update."""
        for index, drops in enumerate(self.drops):
            for which, drop in enumerate(drops):
                drop.key = dropout_key(number, index, which)
        self.inputs.grad = None
        x = self.inputs
        for layer in self.layers:
            x = layer(x)
        self.logits = self.head(x)
        if rate is None:
            return
        parameters = [parameter for _, parameter in self._named()]
        for parameter in parameters:
            parameter.grad = None
        loss_of(self.logits, self.labels).backward()
        update(parameters, rate)

    def results(self) -> dict[str, torch.Tensor]:
        """Return the undivided results of the last step, with the names of `EncoderRun.results`."""
        tensors = {"logits": self.logits.detach()}
        if self.inputs.grad is not None:
            tensors["input gradient"] = self.inputs.grad
        for name, parameter in self._named():
            tensors[name] = parameter.detach()
            if parameter.grad is not None:
                tensors[f"{name} gradient"] = parameter.grad
        return tensors

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        layers = [
            (f"{index}.{name}", p) for index, layer in enumerate(self.layers) for name, p in layer.named_parameters()
        ]
        return [*layers, *((f"head.{name}", p) for name, p in self.head.named_parameters())]
