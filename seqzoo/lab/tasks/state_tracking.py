"""Tracking a state: parity, and the word problem of a finite group."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

import numpy as np

from seqzoo.lab.errors import LabError
from seqzoo.lab.tasks.recipes import SHORT
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import Synthetic

MAX_ORDER = 1000
FACTOR = re.compile(r"([zsa])([1-9]\d{0,3})")


@register_task("parity", SHORT)
@dataclass(frozen=True)
class Parity(Synthetic):
    """Random bits: at each, whether the number of ones so far is odd.

    Args:
        seq_len: T.
        valid_examples: to validate on.
    """

    seq_len: int = 32

    vocab_size = 2

    def check_options(self) -> None:
        self.check("seq_len", self.seq_len, 1)

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        bits = rng.integers(2, size=(count, self.seq_len))
        return bits, np.cumsum(bits, axis=1) % 2


@register_task("group", SHORT)
@dataclass(frozen=True)
class Group(Synthetic):
    """Random elements of a group: at each, the product of all so far, from left to right (arXiv:2404.08819).

    Tokens: the elements, 0 the neutral one.

    Args:
        seq_len: T.
        group: "z60" the integers modulo 60, "s5" and "a5" all and the even permutations of 5; "a4xz5" a product of these.
        valid_examples: to validate on.
    """

    seq_len: int = 32
    group: str = "s3"

    def check_options(self) -> None:
        self.check("seq_len", self.seq_len, 1)
        multiplication(self.group)

    @property
    def vocab_size(self) -> int:
        return len(multiplication(self.group))

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        table = multiplication(self.group)
        elements = rng.integers(len(table), size=(count, self.seq_len))
        products = np.empty_like(elements)
        product = np.zeros(count, dtype=np.int64)
        for position in range(self.seq_len):
            product = products[:, position] = table[product, elements[:, position]]
        return elements, products


@functools.cache
def multiplication(group: str) -> np.ndarray:
    """The table [n, n] of products of the elements 0 … n − 1, 0 being the neutral one. LabError for what is no group here."""
    wanted = "z, s or a with a number, such as z60, s5 or a5, or a product such as a4xz5"
    factors = [FACTOR.fullmatch(factor) for factor in str(group).split("x")]
    table = np.zeros((1, 1), dtype=np.int64)
    for factor in factors:
        other = None if factor is None else _factor(factor[1], int(factor[2]))
        if other is None or len(table) * len(other) > MAX_ORDER:
            raise LabError(f"group: expected {wanted}, of at most {MAX_ORDER} elements, got {group!r}")
        # element (i, j) of a product is number i · len(other) + j
        table = np.kron(table, np.ones_like(other)) * len(other) + np.tile(other, table.shape)
    if len(table) == 1:
        raise LabError(f"group: expected more than the neutral element, got {group!r}")
    return table


def _factor(kind: str, degree: int) -> np.ndarray | None:
    """The table of one cyclic, symmetric or alternating group; None if it is too large."""
    if kind == "z":
        return np.add.outer(np.arange(degree), np.arange(degree)) % degree if degree <= MAX_ORDER else None
    if degree > 6:
        return None
    elements = [p for p in itertools.permutations(range(degree)) if kind == "s" or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return np.array([[number[tuple(p[i] for i in q)] for q in elements] for p in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0
