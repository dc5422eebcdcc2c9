"""Pathfinder, reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from seqzoo.lab.errors import LabError
from seqzoo.lab.tasks.images import label_targets
from seqzoo.lab.tasks.recipes import LONG
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tasks.synthetic import Synthetic

BACKGROUND, CURVE, DOT, APART, TOGETHER = range(5)
STRIDE = 2.0  # pixels from a dash to the next
REACH = 2  # pixels within which dashes of one curve follow each other; those of two curves are farther apart
TURNS = np.linspace(-math.pi / 3, math.pi / 3, 13)
SNAKE_TRIES, IMAGE_TRIES = 100, 100


@register_task("pathfinder", LONG)
@dataclass(frozen=True)
class Pathfinder(Synthetic):
    """Two dots in a picture of dashed curves, read row by row: are they ends of the same curve? (arXiv:1805.08315)

    Tokens: 0 background, 1 a dash, 2 a dot, and as the target 3 (two curves) or 4 (one), half of the examples each. Smaller
    and simpler than the published pictures: one pixel a dash, two long curves and 2 to 4 of half their length.

    Args:
        size: pixels a side; T = size².
        dashes: of a long curve, 4 or more.
        straightness: c; a turn by an angle a has the weight cos²(min(c |a|, π/2)).
        bidirectional: every second layer reads backwards; the target is then at the first token, else at the last.
        valid_examples: to validate on.
    """

    size: int = 32
    dashes: int = 8
    straightness: float = 1.8
    bidirectional: bool = False
    valid_examples: int = 100

    vocab_size = 5

    def check_options(self) -> None:
        self.check("dashes", self.dashes, 4)
        self.check("size", self.size, 2 * self.dashes)
        self.check("straightness", self.straightness, 0)

    @property
    def seq_len(self) -> int:
        return self.size**2

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        together = rng.random(count) < 0.5
        images = (
            np.stack([self._image(rng, bool(same)) for same in together]) if count else np.zeros((0, 0, 0))
        )
        inputs = images.reshape(count, self.seq_len).astype(np.int64)
        labels = np.where(together, TOGETHER, APART)
        return inputs, label_targets(inputs, labels, first=self.bidirectional)

    def _image(self, rng: np.random.Generator, together: bool) -> np.ndarray:
        for _ in range(IMAGE_TRIES):
            taken = np.zeros((self.size, self.size), dtype=bool)
            lengths = [self.dashes] * 2 + [self.dashes // 2] * int(rng.integers(2, 5))
            curves = [self._curve(rng, taken, length) for length in lengths]
            if all(curve is not None for curve in curves):
                return _draw(rng, self.size, [curve for curve in curves if curve is not None], together)
        raise LabError(
            f"pathfinder: curves of {self.dashes} dashes do not fit into size={self.size}: ask for fewer"
        )

    def _curve(self, rng: np.random.Generator, taken: np.ndarray, length: int) -> np.ndarray | None:
        """Pixels [length, 2] of a curve far from those that are taken, which it then takes too; None if none fits."""
        for _ in range(SNAKE_TRIES):
            pixels = self._walk(rng, length)
            body = np.concatenate([pixels, _dot(pixels[0]), _dot(pixels[-1])])
            if body.min() < 0 or body.max() >= self.size:
                continue
            if not any(taken[_around(pixel)].any() for pixel in body):
                taken[tuple(body.T)] = True
                return pixels
        return None

    def _walk(self, rng: np.random.Generator, length: int) -> np.ndarray:
        weights = np.cos(np.minimum(self.straightness * np.abs(TURNS), math.pi / 2)) ** 2
        turns = rng.choice(TURNS, size=length - 1, p=weights / weights.sum())
        angles = rng.uniform(0, 2 * math.pi) + np.cumsum(turns)
        steps = STRIDE * np.stack([np.sin(angles), np.cos(angles)], axis=1)
        start = rng.uniform(0, self.size - 1, size=(1, 2))
        return np.round(np.concatenate([start, start + np.cumsum(steps, axis=0)])).astype(np.int64)


def _draw(rng: np.random.Generator, size: int, curves: list[np.ndarray], together: bool) -> np.ndarray:
    """The picture: all curves, and dots at both ends of one of the two long ones or at an end of each."""
    image = np.full((size, size), BACKGROUND)
    for curve in curves:
        image[tuple(curve.T)] = CURVE
    first, second = rng.permutation(2)
    ends = rng.choice([0, -1], size=2)
    dots = (
        (curves[first][0], curves[first][-1])
        if together
        else (curves[first][ends[0]], curves[second][ends[1]])
    )
    for pixel in dots:
        image[tuple(_dot(pixel).T)] = DOT
    return image


def _dot(pixel: np.ndarray) -> np.ndarray:
    """Pixels [4, 2] of a dot at an end of a curve."""
    return pixel + np.array([[0, 0], [0, 1], [1, 0], [1, 1]])


def _around(pixel: np.ndarray) -> tuple[slice, ...]:
    """The square of the pixels within reach of one."""
    return tuple(slice(max(0, place - REACH), place + REACH + 1) for place in pixel)
