"""The training text: tokenized without loss, the same in every run, different on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("yaml")

from examples.gpt_neox import DataError, load_config
from examples.gpt_neox.data import RankData, Samples, load_samples, read_text
from examples.gpt_neox.tokenizers import ByteTokenizer, WordTokenizer

STRANGE = [b"", b" ", b"\n\t  x", b"Hello, world! 42 times", "Grüße, мир, 世界".encode(), bytes(range(256)) * 2]


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_tokens_give_the_text_back(text: bytes) -> None:
    words = WordTokenizer(b"Hello, world! Hello, world! x", 300)
    for tokenizer in (ByteTokenizer(), words, WordTokenizer(text, 50257)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def test_frequent_words_get_ids_of_their_own() -> None:
    text = b"the cat and the dog and the bird"
    tokenizer = WordTokenizer(text, 258)
    assert tokenizer.encode(b" the and the").tolist()[-1] == 257
    assert len(tokenizer.encode(text)) < len(text)
    assert tokenizer.encode(b" and").tolist() == [256]


def test_default_text_is_real_and_long_enough() -> None:
    text = read_text(None)
    assert len(text) > 300_000
    assert b"assignment" in text


def test_word_vocabulary_uses_the_real_range() -> None:
    samples = load_samples(load_config(["19M"], {"seq_length": 128}), None)
    largest = max(int(samples[number].max()) for number in range(samples.count))
    assert 1_000 < largest < 50_257


def numbered(count: int, length: int = 4, seed: int = 7) -> Samples:
    return Samples(np.arange(count * length + 1, dtype=np.int32), length, seed)


def test_samples_are_contiguous_and_cover_the_text_once() -> None:
    samples = numbered(10)
    seen = [samples[number].tolist() for number in range(10)]
    assert all(sample == list(range(sample[0], sample[0] + 5)) for sample in seen)
    assert sorted(sample[0] for sample in seen) == list(range(0, 40, 4))


def test_each_pass_is_shuffled_anew_and_reproducibly() -> None:
    first, again, other = numbered(50), numbered(50), numbered(50, seed=8)
    order = [int(first[number][0]) for number in range(100)]
    assert order == [int(again[number][0]) for number in range(100)]
    assert order[:50] != order[50:]
    assert order != [int(other[number][0]) for number in range(100)]
    assert int(first[3][0]) == order[3]  # an earlier pass can be read again


def test_ranks_share_no_sample() -> None:
    samples = numbered(48)
    seen = []
    for rank in range(3):
        data = RankData(samples, rank, 3, micro_batch=2, accumulation=2)
        seen += [int(row[0]) for step in range(4) for batch in data.step(step) for row in batch]
    assert len(seen) == len(set(seen)) == 48


def test_a_global_batch_does_not_depend_on_its_division() -> None:
    def batch(ranks: int, micro_batch: int, accumulation: int) -> set[int]:
        divided = [RankData(numbered(64), rank, ranks, micro_batch, accumulation) for rank in range(ranks)]
        return {int(row[0]) for data in divided for micro in data.step(2) for row in micro}

    assert batch(1, 8, 1) == batch(4, 2, 1) == batch(2, 2, 2) == batch(2, 1, 4)


def test_the_training_share_is_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    samples = load_samples(load_config(["tiny"], {"split": "90,5,5"}), str(path))
    assert {int(token) for number in range(samples.count) for token in samples[number]} == {ord("a")}


def test_a_short_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"too short")
    with pytest.raises(DataError, match="33"):
        load_samples(load_config(["tiny"]), str(path))


def test_a_missing_text_is_an_error() -> None:
    with pytest.raises(DataError, match="--data"):
        read_text("/nowhere/text.txt")
