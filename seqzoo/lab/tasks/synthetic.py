"""What tasks that are drawn from a seed have in common."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from seqzoo.lab.errors import LabError

if TYPE_CHECKING:
    from torchmetrics import Metric

IGNORED = -100  # a target that does not count
TRAINING, VALIDATION = 0, 1  # streams of random numbers that never meet


@dataclass(frozen=True)
class Synthetic:
    """A task of accuracy whose examples are drawn from a seed: fresh ones at each step, a fixed set to validate on.

    A subclass is a frozen dataclass of options; it has ``seq_len`` and ``vocab_size`` and writes ``examples``.
    """

    valid_examples: int = 500

    name: ClassVar[str] = ""  # the registered one
    metric_name: ClassVar[str] = "accuracy"

    def __post_init__(self) -> None:
        """Refuse options that have no examples."""
        self.check("valid_examples", self.valid_examples, 1)
        self.check_options()

    def check_options(self) -> None:
        """LabError for options that have no examples."""

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 … vocab_size − 1."""
        raise NotImplementedError

    def examples(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [count, T] of integers; a target of −100 does not count."""
        raise NotImplementedError

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """As ``examples``, those to validate on: from a stream of their own."""
        return self.examples(np.random.default_rng((VALIDATION,)), self.valid_examples)

    def train_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] of a step: a function of (seed, step)."""
        return _tensors(self.examples(np.random.default_rng((TRAINING, seed, step)), batch_size))

    def valid_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of the validation examples; the same at each call."""
        parts = _validation(self)
        yield from zip(*(part.split(batch_size) for part in parts), strict=True)

    def metric(self) -> Metric:
        """A fresh metric, to be updated with logits and targets."""
        from seqzoo.lab.metrics import TokenAccuracy

        return TokenAccuracy(self.vocab_size)

    def describe(self) -> dict[str, object]:
        """What a configuration file keeps of the task."""
        return {"name": self.name, "seq_len": self.seq_len, "vocab_size": self.vocab_size, **asdict(self)}

    def check(self, option: str, value: float, least: float, most: float = float("inf")) -> None:
        """LabError unless ``least <= value <= most``."""
        if not least <= value <= most:
            span = f"{least} or more" if most == float("inf") else f"{least} to {most}"
            raise LabError(f"{self.name}: {option}: expected {span}, got {value}")


def distinct(
    rng: np.random.Generator, count: int, size: int, of: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """[count, size] of 0 … of − 1, no number twice in a row, each drawn in proportion to ``weights`` from those left.

    The order of ``log weight`` plus Gumbel noise is that of drawing one after the other without putting back.
    """
    scores = rng.gumbel(size=(count, of))
    if weights is not None:
        scores += np.log(weights)
    return np.argsort(-scores, axis=1)[:, :size]


@functools.lru_cache(maxsize=4)
def _validation(task: Synthetic) -> tuple[Tensor, Tensor]:
    return _tensors(task.validation())


def _tensors(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for array in arrays)
    return inputs, targets
