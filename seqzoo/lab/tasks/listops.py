"""ListOps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqzoo.lab.errors import LabError
from seqzoo.lab.tasks.recipes import SHORT
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import IGNORED, Synthetic

OPERATORS: dict[int, Callable[[Sequence[int]], int]] = {  # by the token that opens them
    10: min,
    11: max,
    12: lambda values: int(statistics.median(values)),
    13: lambda values: sum(values) % 10,
}
CLOSE, PAD = 14, 15
DIGIT_SHARE = 0.25  # of the nodes that may be either, digits
TRIES = 20_000  # for one expression


@register_task("listops", SHORT)
@dataclass(frozen=True)
class ListOps(Synthetic):
    """Nested minimum, maximum, median and sum modulo 10 of digits: say the value (arXiv:1804.06028).

    Tokens: the digits, 10 … 13 "[MIN" "[MAX" "[MED" "[SM", 14 "]", 15 a pad behind the expression. The target, a digit, is
    at the expression's last token. Trees are drawn as those of the Long Range Arena and kept if their length is right.

    Args:
        seq_len: T, tokens of the longest expression.
        min_length: tokens of the shortest, 4 or more.
        max_depth: levels below the root.
        max_args: of an operator, 2 or more.
        valid_examples: to validate on.
    """

    seq_len: int = 64
    min_length: int = 16
    max_depth: int = 4
    max_args: int = 5

    vocab_size = 16

    def check_options(self) -> None:
        self.check("max_depth", self.max_depth, 1)
        self.check("max_args", self.max_args, 2)
        self.check("seq_len", self.seq_len, 4)
        longest = 1
        for _ in range(self.max_depth):
            longest = min(2 + self.max_args * longest, self.seq_len)
        self.check("min_length", self.min_length, 4, longest)

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.full((count, self.seq_len), PAD)
        targets = np.full_like(inputs, IGNORED)
        draw = random.Random(int(rng.integers(2**62)))  # faster than numpy for single numbers
        for row in range(count):
            tokens, value = self._expression(draw)
            inputs[row, : len(tokens)] = tokens
            targets[row, len(tokens) - 1] = value
        return inputs, targets

    def _expression(self, draw: random.Random) -> tuple[list[int], int]:
        for _ in range(TRIES):
            tokens: list[int] = []
            value = self._operator(draw, tokens, depth=0)
            if value is not None and self.min_length <= len(tokens) <= self.seq_len:
                return tokens, value
        raise LabError(
            f"listops: of {TRIES:,} expressions of max_depth={self.max_depth} and max_args={self.max_args} none has "
            f"{self.min_length} to {self.seq_len} tokens: allow more lengths"
        )

    def _operator(self, draw: random.Random, tokens: list[int], depth: int) -> int | None:
        """Append an operator with its arguments; its value, or None once there are too many tokens."""
        token = draw.randrange(10, 14)
        tokens.append(token)
        values = []
        for _ in range(draw.randint(2, self.max_args)):
            if depth + 1 < self.max_depth and draw.random() > DIGIT_SHARE:
                value = self._operator(draw, tokens, depth + 1)
            else:
                value = draw.randrange(10)
                tokens.append(value)
            if value is None or len(tokens) > self.seq_len:
                return None
            values.append(value)
        tokens.append(CLOSE)
        return OPERATORS[token](values)
