"""Real images as sequences of pixels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from seqzoo.lab.tasks.recipes import SHORT
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import IGNORED, Synthetic

GREYS = 17  # 0 … 16
DIGITS = replace(SHORT, embedding_std=0.1, training=replace(SHORT.training, lr=5e-3))


def label_targets(inputs: np.ndarray, labels: np.ndarray, *, first: bool) -> np.ndarray:
    """Targets [B, T] with the labels [B] at the first or the last token."""
    targets = np.full_like(inputs, IGNORED)
    targets[:, 0 if first else -1] = labels
    return targets


@register_task("digits", DIGITS)
@dataclass(frozen=True)
class Digits(Synthetic):
    """1797 handwritten digits of 8 × 8 pixels, read row by row: which digit is it? (scikit-learn's)

    Tokens: 0 … 16 the grey of a pixel, and as the target 17 … 26 the digit.

    Args:
        bidirectional: every second layer reads backwards; the target is then at the first token, else at the last.
        valid_examples: images held out, always the same.
    """

    bidirectional: bool = False
    valid_examples: int = 360

    seq_len = 64
    vocab_size = GREYS + 10

    def check_options(self) -> None:
        self.check("valid_examples", self.valid_examples, 1, len(_digits()[0]) - 1)

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._pick(rng.integers(self.valid_examples, len(_digits()[0]), size=count))

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        return self._pick(np.arange(self.valid_examples))

    def _pick(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = _digits()
        inputs = images[rows]
        return inputs, label_targets(inputs, GREYS + labels[rows], first=self.bidirectional)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 64] and labels [n], in one mixed order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.data[order].astype(np.int64), data.target[order].astype(np.int64)
