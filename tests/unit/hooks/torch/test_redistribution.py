"""What is said of the placements of redistributed tensors."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from commtrace.hooks.torch.redistribution import text_of


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((Shard(0), Replicate()), "S(0),R"),
        ((Partial(), Partial("avg")), "P,P"),
        ((_StridedShard(0, split_factor=2), Shard(0)), "_S(0, 2),S(0)"),
    ],
)
def test_text_of_placements(placements: tuple[Placement, ...], text: str) -> None:
    assert text_of(placements) == text
