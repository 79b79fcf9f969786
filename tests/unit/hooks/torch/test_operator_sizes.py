"""Sizes of calls that gloo cannot make, from the rules alone: uneven lists, and arguments of other backends."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commtrace.hooks.torch.c10d_operators import IGNORED, Operator, known_operators, nbytes
from commtrace.operations import OPERATIONS

OPERATORS: dict[str, Operator] = {operator.variant: operator for operator in known_operators()[0]}


def arguments(variant: str, **values: Any) -> list[Any]:
    """Return the values in the order of the operator's schema, with None for arguments that are not given."""
    schema = OPERATORS[variant].overload._schema.arguments
    assert set(values) <= {argument.name for argument in schema}
    return [values.get(argument.name) for argument in schema]


def floats(*sizes: int) -> list[Any]:
    return [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize(
    ("variant", "rank", "values", "expected"),
    [
        ("allgather_", 1, {"output_tensors": [floats(3, 5)], "input_tensors": floats(5)}, (32, 20, True)),
        ("allgather_coalesced_", 0,
         {"output_lists": [floats(3, 3), floats(2, 2)], "input_list": floats(3, 2)}, (40, 20, False)),
        ("reduce_scatter_", 0, {"input_tensors": [floats(1, 6)], "output_tensors": floats(1)}, (28, 4, True)),
        ("reduce_scatter_tensor_coalesced_", 0,
         {"inputs": floats(4, 6), "outputs": floats(2, 3)}, (40, 20, False)),
        ("alltoall_", 1, {"input_tensors": floats(3, 5), "output_tensors": floats(5, 5)}, (32, 20, True)),
        ("alltoall_", 0, {"input_tensors": floats(4, 4), "output_tensors": floats(4, 4)}, (32, 16, False)),
        ("alltoall_base_", 0,
         {"input": torch.zeros(6, 2), "output": torch.zeros(5, 2), "input_split_sizes": [3, 3],
          "output_split_sizes": [3, 2]}, (48, 24, True)),
        ("alltoall_base_", 1,
         {"input": torch.zeros(0, 2), "output": torch.zeros(2, 2), "input_split_sizes": [0, 0],
          "output_split_sizes": [1, 1]}, (0, 0, False)),
        ("gather_", 1, {"input_tensors": floats(7), "output_tensors": []}, (56, 28, False)),
        ("scatter_", 1, {"output_tensors": floats(7), "input_tensors": []}, (56, 28, False)),
        ("barrier", 0, {"tensor": torch.zeros(1)}, (0, 0, False)),
    ],
)  # fmt: skip
def test_sizes(variant: str, rank: int, values: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    given = arguments(variant, **values)
    assert OPERATORS[variant].measure(given, 2, rank) == expected
    sample = OPERATORS[variant].sample(given)
    assert sample is not None
    assert sample.dtype == torch.float32


def test_a_call_without_tensors_has_no_sample() -> None:
    given = arguments("alltoall_", input_tensors=[], output_tensors=[])
    assert OPERATORS["alltoall_"].sample(given) is None
    assert OPERATORS["alltoall_"].measure(given, 2, 0) == (0, 0, False)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), 6),
        (torch.zeros(3, dtype=torch.bool), 3),
        (torch.zeros(3, dtype=torch.complex128), 48),
        (torch.zeros(8)[::2], 16),
        (torch.zeros(2, 1).expand(2, 5), 40),
        (torch.eye(4).to_sparse(), 4 * (2 * 8 + 4)),
        (torch.zeros(0, 9), 0),
    ],
)
def test_bytes_of_a_tensor(tensor: Any, size: int) -> None:
    assert nbytes(tensor) == size


def test_every_operator_of_this_torch_is_known() -> None:
    """Every operator of this torch has a rule or is in IGNORED; add new operators to one of them."""
    _, unknown = known_operators()
    assert unknown == []
    assert "check_for_nan" in IGNORED
    assert len(OPERATORS) >= 20


def test_every_operator_has_an_operation() -> None:
    assert {operator.op for operator in OPERATORS.values()} <= {*OPERATIONS, "unknown"}
