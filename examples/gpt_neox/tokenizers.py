"""Two tokenizers without downloads: bytes (256 ids), and words of the text with bytes as fallback.

The word vocabulary stands in for GPT-2's byte-pair encoding: it has the same number of ids (50,257, padded to 50,304),
so that the embedding, its gradient and their communication have the real shapes. It is not a byte-pair encoding.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

# A word, a number or other signs, with the space before it, as in GPT-2's split before merging; or white space. Every
# byte matches one of them, so the joined pieces equal the text. Bytes from 128 on count as letters (UTF-8).
_PIECE = re.compile(rb" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9\x80-\xff]+|\s+")


class Tokenizer(Protocol):
    """Lossless conversion between text and token ids."""

    vocab_size: int

    def encode(self, text: bytes) -> Tokens:
        """Return the token ids of a text."""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of token ids."""


class ByteTokenizer:
    """Tokenizer in which each byte is a token."""

    vocab_size = 256

    def encode(self, text: bytes) -> Tokens:
        """Return the token ids of a text."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of token ids."""
        return bytes(tokens)


class WordTokenizer:
    """Tokenizer of the most frequent pieces (words with leading space, signs) of a text, and bytes for the rest.

    Ids 0 to 255 are the bytes; then the pieces, most frequent first, equally frequent ones in the order of their bytes,
    so that the same text gives the same ids everywhere.
    """

    def __init__(self, text: bytes, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        counts = Counter(piece for piece in _PIECE.findall(text) if len(piece) > 1)
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocab_size - 256]
        self._pieces = [bytes([byte]) for byte in range(256)] + ranked
        self._ids = {piece: index for index, piece in enumerate(self._pieces)}

    def encode(self, text: bytes) -> Tokens:
        """Return the token ids of a text."""
        ids = array("i")
        for match in _PIECE.finditer(text):
            piece = match.group()
            known = self._ids.get(piece)
            if known is None:
                ids.extend(piece)
            else:
                ids.append(known)
        return np.frombuffer(ids, dtype=np.int32) if ids else np.empty(0, dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of token ids."""
        return b"".join(self._pieces[token] for token in tokens)


def make_tokenizer(vocab: str, text: bytes, vocab_size: int) -> Tokenizer:
    """Create a tokenizer by name: ``bytes`` or ``words``."""
    return ByteTokenizer() if vocab == "bytes" else WordTokenizer(text, vocab_size)
