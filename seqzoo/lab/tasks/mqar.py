"""Multi-query associative recall."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqzoo.lab.errors import LabError
from seqzoo.lab.tasks.recipes import RECALL
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import IGNORED, Synthetic, distinct


@register_task("mqar", RECALL)
@dataclass(frozen=True)
class MQAR(Synthetic):
    """Pairs of a key and a value, then the keys again among blanks: at each, say its value (arXiv:2312.04927).

    Tokens: 0 is the blank, the lower half of the vocabulary keys, the upper half values, drawn anew for each example.
    A key returns after a gap g = 1, 2, ... that has the probability of g^(power - 1): a small power favours short gaps.

    Args:
        seq_len: T, even.
        pairs: P; 4 P tokens at least fit into T.
        vocab_size: even.
        power: above 0; 1 makes all gaps as likely.
        valid_examples: to validate on.
    """

    seq_len: int = 64
    pairs: int = 4
    vocab_size: int = 64
    power: float = 0.01

    def check_options(self) -> None:
        if self.vocab_size % 2 or self.seq_len % 2:
            raise LabError(
                f"mqar: expected even vocab_size and seq_len, got {self.vocab_size} and {self.seq_len}"
            )
        self.check("pairs", self.pairs, 1, self.vocab_size // 2 - 1)
        self.check("seq_len", self.seq_len, 4 * self.pairs)
        self.check("power", self.power, 1e-6)

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        half, context = self.vocab_size // 2, 2 * self.pairs
        keys = 1 + distinct(rng, count, self.pairs, half - 1)
        values = half + distinct(rng, count, self.pairs, half)
        spaces = (self.seq_len - context) // 2
        weights = np.arange(1, spaces + 1) ** (self.power - 1)
        queries = context + 2 * distinct(rng, count, self.pairs, spaces, weights)

        inputs = np.zeros((count, self.seq_len), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        np.put_along_axis(inputs, queries, keys, axis=1)
        np.put_along_axis(targets, queries, values, axis=1)
        return inputs, targets
