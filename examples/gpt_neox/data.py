"""Training samples from a text: contiguous, shuffled by the seed alone, different on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .config import TrainingConfig
from .errors import DataError
from .tokenizers import Tokens, make_tokenizer


def read_text(path: str | None) -> bytes:
    """Read a file or, without one, the text of Python's ``help()`` (0.7 MB)."""
    if path is None:
        return _python_topics()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: not readable ({error.strerror}); give a text file with --data") from error


def _python_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python has no pydoc_data, the default text; give a text file with --data") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Samples:
    """Samples of ``length + 1`` tokens; the last token of one is the first of the next.

    Sample numbers have no upper limit: each pass over the text is shuffled again, by (seed, pass).
    """

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self.count = (len(tokens) - 1) // length
        if self.count < 1:
            raise DataError(
                f"the training text has {len(tokens)} tokens, and one sample needs seq_length + 1 = {length + 1}; "
                "give a longer text with --data, or a smaller --seq-length"
            )
        self._tokens, self._length, self._seed = tokens, length, seed
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> Tokens:
        """Return a sample by its number, from 0."""
        text_pass, index = divmod(number, self.count)
        if text_pass != self._pass:
            self._pass, self._order = text_pass, np.random.default_rng((self._seed, text_pass)).permutation(self.count)
        start = int(self._order[index]) * self._length
        return self._tokens[start : start + self._length + 1]


class RankData:
    """The micro-batches of one data-parallel rank.

    Sample numbers increase by micro-batch, then by rank, then by row: no two ranks share a sample within a pass, and a
    step's global batch is the same set for every number of ranks.
    """

    def __init__(self, samples: Samples, rank: int, ranks: int, micro_batch: int, accumulation: int) -> None:
        self._samples, self._rank, self._ranks = samples, rank, ranks
        self._micro_batch, self._accumulation = micro_batch, accumulation

    def numbers(self, step: int, micro: int) -> range:
        """Return the sample numbers of a micro-batch; steps and micro-batches count from 0."""
        start = ((step * self._accumulation + micro) * self._ranks + self._rank) * self._micro_batch
        return range(start, start + self._micro_batch)

    def step(self, step: int) -> list[torch.Tensor]:
        """Return the micro-batches of a step, each int64 (micro-batch, length + 1)."""
        return [self._stack(self.numbers(step, micro)) for micro in range(self._accumulation)]

    def _stack(self, numbers: range) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._samples[number] for number in numbers]).astype(np.int64))


def load_samples(config: TrainingConfig, path: str | None) -> Samples:
    """Read the training share of the text, its beginning (GPT-NeoX's ``split``), as samples of tokens."""
    text = read_text(path)
    text = text[: int(len(text) * config.train_share)]
    tokens = make_tokenizer(config.vocab, text, config.vocab_size).encode(text)
    return Samples(tokens, config.seq_length, config.seed)
