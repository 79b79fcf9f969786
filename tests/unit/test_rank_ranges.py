"""Lists of ranks as text: exact for any list, and short for regular ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trainings

from commtrace.rank_ranges import MAX_RANKS, format_rank_list, parse_rank_list


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(10_000), "0-9999"),
        (range(0, 10_000, 8), "0-9992:8"),
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 8], "0,8"),
        ([0, 8, 9, 10], "0,8-10"),
        ([0, 1, 8, 9, 16, 17], "0-1,8-9,16-17"),
        ([8, 0, 1, 2, 3], "8,0-3"),
        ([3, 2, 1, 0], "3,2,1,0"),
        ([0, 0, 1, 1], "0,0-1,1"),
    ],
)
def test_lists_of_ranks_as_text(ranks: Sequence[int], text: str) -> None:
    assert format_rank_list(ranks) == text
    assert parse_rank_list(text) == [*ranks]


def test_any_list_of_ranks_is_kept_in_its_order() -> None:
    """Lists of regular pieces, of shuffled ranks and of both keep their order as text."""
    rng = random.Random(trainings.seed())
    for _ in range(2_000):
        ranks: list[int] = []
        for _ in range(rng.randrange(6)):
            first, count, stride = (
                rng.randrange(MAX_RANKS // 2),
                rng.randrange(12),
                rng.choice((1, 1, 2, 8, 512)),
            )
            piece = [*range(first, first + count * stride, stride)]
            ranks += rng.choice((piece, piece[::-1], rng.sample(piece, len(piece)), piece * 2))
        text = format_rank_list(ranks)
        assert parse_rank_list(text) == ranks
        assert len(text) <= len(",".join(map(str, ranks)))


@pytest.mark.parametrize("text", [f"0-{MAX_RANKS}", str(MAX_RANKS), "0-999999,0-999999", "0-99999999999999999999"])
def test_more_ranks_than_a_job_has_are_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="more than"):
        parse_rank_list(text)


def test_a_stride_of_0_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="1-5:0 has a stride of 0"):
        parse_rank_list("0,1-5:0")
