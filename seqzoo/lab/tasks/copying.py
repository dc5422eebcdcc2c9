"""Copying, plain and selective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqzoo.lab.tasks.recipes import SHORT
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import IGNORED, Synthetic, distinct


@register_task("copying", SHORT)
@dataclass(frozen=True)
class Copying(Synthetic):
    """M symbols, a long blank, then M marks at which to repeat the symbols in order.

    Tokens: 0 is the blank, 1 … vocab_size − 2 are symbols, vocab_size − 1 is the mark.

    Args:
        seq_len: T, the marks included.
        symbols: M; 2 M tokens at least fit into T.
        vocab_size: 3 or more.
        valid_examples: to validate on.
    """

    seq_len: int = 64
    symbols: int = 8
    vocab_size: int = 10

    def check_options(self) -> None:
        self.check("vocab_size", self.vocab_size, 3)
        self.check("symbols", self.symbols, 1)
        self.check("seq_len", self.seq_len, 2 * self.symbols)

    def places(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Where the symbols stand, [count, M], ascending."""
        return np.tile(np.arange(self.symbols), (count, 1))

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        symbols = rng.integers(1, self.vocab_size - 1, size=(count, self.symbols))
        inputs = np.zeros((count, self.seq_len), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, self.places(rng, count), symbols, axis=1)
        inputs[:, -self.symbols :] = self.vocab_size - 1
        targets[:, -self.symbols :] = symbols
        return inputs, targets


@register_task("selective_copying", SHORT)
@dataclass(frozen=True)
class SelectiveCopying(Copying):
    """Copying of symbols that stand scattered among the blanks (arXiv:2312.00752).

    Options and tokens as ``copying``.
    """

    def places(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.sort(distinct(rng, count, self.symbols, self.seq_len - self.symbols), axis=1)
