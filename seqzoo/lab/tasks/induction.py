"""Induction heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqzoo.lab.tasks.recipes import SHORT
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import IGNORED, Synthetic, distinct


@register_task("induction", SHORT)
@dataclass(frozen=True)
class Induction(Synthetic):
    """Random tokens with a trigger among them; the last token is the trigger again: say what followed it (arXiv:2212.14052).

    Tokens: 0 … vocab_size − 2 are ordinary, vocab_size − 1 is the trigger.

    Args:
        seq_len: T.
        triggers: before the last one, none beside another; the same token follows each, and counts from the second on.
        vocab_size: 2 or more.
        valid_examples: to validate on.
    """

    seq_len: int = 32
    triggers: int = 1
    vocab_size: int = 20

    def check_options(self) -> None:
        self.check("vocab_size", self.vocab_size, 2)
        self.check("triggers", self.triggers, 1)
        self.check("seq_len", self.seq_len, 2 * self.triggers + 1)

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = rng.integers(self.vocab_size - 1, size=(count, self.seq_len))
        answers = rng.integers(self.vocab_size - 1, size=(count, 1))
        # k places of n with a gap between any two are k places of n − k + 1, spread by their rank
        places = distinct(rng, count, self.triggers, self.seq_len - 1 - self.triggers)
        places = np.sort(places, axis=1) + np.arange(self.triggers)
        np.put_along_axis(inputs, places, self.vocab_size - 1, axis=1)
        np.put_along_axis(inputs, places + 1, answers, axis=1)
        inputs[:, -1] = self.vocab_size - 1

        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(targets, places[:, 1:], answers, axis=1)
        targets[:, -1:] = answers
        return inputs, targets
