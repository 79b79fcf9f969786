"""The model, compared with GPT-NeoX's counts, a hand calculation and its own gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("yaml")

import torch

from examples.gpt_neox import GPTNeoX, TrainingConfig, load_config
from examples.gpt_neox.layers import Block, rotate
from examples.gpt_neox.model import language_model_loss, layer_specs, weight_decay_groups


def tiny(**changes: Any) -> TrainingConfig:
    return load_config(["tiny"]).model_copy(update=changes)


def build(config: TrainingConfig, seed: int = 0) -> GPTNeoX:
    torch.manual_seed(seed)
    return GPTNeoX(config)


def block(model: GPTNeoX, index: int) -> Block:
    layer = model.layers[f"block_{index}"]
    assert isinstance(layer, Block)
    return layer


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def count(config: TrainingConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPTNeoX(config).parameters())


# GPT-NeoX's own counts of these models: untied, with 50257 ids padded to 50304.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("19M", 70_426_624), ("125M", 162_322_944), ("1-3B", 1_414_647_808), ("13B", 13_100_697_600)],
)
def test_parameter_count_is_gpt_neox_s(name: str, parameters: int) -> None:
    config = load_config([name])
    hidden, vocab = config.hidden_size, config.padded_vocab_size
    assert count(config) == parameters
    assert count(config) == 2 * vocab * hidden + config.num_layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert count(config.model_copy(update={"no_weight_tying": False})) == parameters - vocab * hidden


@pytest.mark.parametrize("parallel", [False, True])
def test_no_token_sees_the_future(parallel: bool) -> None:
    model = build(tiny(gpt_j_residual=parallel))
    before = tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 256
    with torch.no_grad():
        first, second = model(before), model(after)
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.isclose(first[:, 9:], second[:, 9:]).all(dim=-1).any()


def test_rotary_against_a_hand_calculation() -> None:
    """4 of a head's 6 dimensions are rotated at each of 3 positions: 0 together with 2, and 1 with 3."""
    x = torch.arange(1.0, 19.0).reshape(1, 1, 3, 6)
    rotated = rotate(x, 4, 10000.0)
    for position in range(3):
        a, b, c, d, *rest = x[0, 0, position].tolist()
        fast, slow = float(position), position * 10000.0**-0.5
        expected = [
            a * math.cos(fast) - c * math.sin(fast),
            b * math.cos(slow) - d * math.sin(slow),
            c * math.cos(fast) + a * math.sin(fast),
            d * math.cos(slow) + b * math.sin(slow),
            *rest,
        ]
        assert rotated[0, 0, position].tolist() == pytest.approx(expected, rel=1e-5)


def test_rotary_depends_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    queries, keys = rotate(query.expand(1, 1, 12, 8), 8, 10000.0), rotate(key.expand(1, 1, 12, 8), 8, 10000.0)
    scores = (queries @ keys.transpose(-1, -2))[0, 0]
    assert scores[5, 2].item() == pytest.approx(scores[11, 8].item(), rel=1e-4)
    assert scores[5, 2].item() != pytest.approx(scores[5, 3].item(), rel=1e-3)


def test_attention_against_its_definition() -> None:
    config = tiny(num_layers=1, rotary_pct=1.0)
    attention = block(build(config), 0).attention
    x = torch.randn(1, 7, config.hidden_size)
    heads, width = config.num_attention_heads, config.head_size
    query, key, value = attention.query_key_value(x).view(1, 7, heads, 3 * width).transpose(1, 2).split(width, dim=-1)
    query, key = rotate(query, width, 10000.0), rotate(key, width, 10000.0)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    expected = attention.dense((scores.softmax(-1) @ value).transpose(1, 2).reshape(1, 7, -1))
    torch.testing.assert_close(attention(x), expected)


def test_sequential_and_parallel_residual() -> None:
    x = torch.randn(1, 5, 96)
    for parallel in (False, True):
        layer = block(build(tiny(gpt_j_residual=parallel)), 1)
        attended = x + layer.attention(layer.input_layernorm(x))
        expected = attended + layer.mlp(layer.post_attention_layernorm(x if parallel else attended))
        torch.testing.assert_close(layer(x), expected)


def test_tied_head_is_the_embedding() -> None:
    tied, untied = build(tiny(no_weight_tying=False)), build(tiny())
    assert tied.layers["head"].weight is tied.layers["embedding"].weight
    assert untied.layers["head"].weight is not untied.layers["embedding"].weight
    assert sum(1 for _ in tied.parameters()) == sum(1 for _ in untied.parameters()) - 1


def gradients(model: GPTNeoX) -> dict[str, torch.Tensor]:
    batch = tokens(length=17)
    torch.autograd.backward(language_model_loss(model(batch[:, :-1]), batch[:, 1:]))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in grads.items() if gradient is not None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_checkpointing_changes_no_gradient(reentrant: bool, every: int) -> None:
    config = tiny(num_layers=3)
    changes: dict[str, Any] = {
        "checkpoint_activations": True,
        "checkpoint_num_layers": every,
        "checkpoint_reentrant": reentrant,
    }
    plain = gradients(build(config))
    recomputed = gradients(build(config.model_copy(update=changes)))
    assert len(plain) == len(list(build(config).parameters()))
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_checkpointing_computes_blocks_twice() -> None:
    model = build(tiny(checkpoint_activations=True, checkpoint_num_layers=1))
    calls: list[int] = []
    for index in range(2):
        block(model, index).attention.register_forward_hook(lambda *_, index=index: calls.append(index))
    gradients(model)
    assert calls == [0, 1, 1, 0]  # forward, then each block again before its backward


def test_layers_in_a_row_are_the_model() -> None:
    """Building and running the specs one by one, as a pipeline does, gives the same logits."""
    config = tiny()
    model = build(config)
    torch.manual_seed(0)
    layers = [spec.build(None) for spec in layer_specs(config)]
    x = tokens()
    expected = model(x)
    for layer in layers:
        x = layer(x)
    assert torch.equal(x, expected)


def test_weight_decay_leaves_biases_and_norms_alone() -> None:
    model = build(tiny())
    decaying, plain = weight_decay_groups(model, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in decaying["params"])
    assert all(parameter.dim() == 1 for parameter in plain["params"])
    assert len(decaying["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_dropout_is_for_training_only() -> None:
    model = build(tiny(hidden_dropout=0.5, attention_dropout=0.5))
    x = tokens()
    assert not torch.equal(model(x), model(x))
    eval_model = copy.deepcopy(model).eval()
    assert torch.equal(eval_model(x), eval_model(x))


def test_first_loss_is_a_guess_among_all_ids() -> None:
    batch = tokens(4, 33)
    loss = language_model_loss(build(tiny())(batch[:, :-1]), batch[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.5)
