"""Tokens of one's own: an array of integers in a .npy file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seqzoo.lab.data import VALIDATION_SHARE
from seqzoo.lab.errors import LabError

if TYPE_CHECKING:
    from seqzoo.lab.metrics import BitsPerByte

LARGEST_VOCAB = 2**20
DEFAULT_SEQ_LEN = 128


@dataclass(frozen=True)
class NextToken:
    """The task of predicting each next token. The last tenth, of the sequence or of the rows, is held out.

    ``train`` and ``valid`` are both [n], a sequence that windows are drawn from, or both [N, T + 1], a sequence a row.
    """

    name: str
    train: Tensor
    valid: Tensor
    seq_len: int
    valid_windows: int = 256

    metric_name = "bits_per_token"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return int(max(self.train.max(), self.valid.max())) + 1

    def train_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] of a step: a function of (seed, step)."""
        rng = np.random.default_rng((seed, step))
        return self._pick(
            self.train, torch.from_numpy(rng.integers(self._places(self.train), size=batch_size))
        )

    def valid_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of the validation windows: always the same, evenly spaced, none overlapping."""
        apart = self.seq_len + 1 if self.valid.ndim == 1 else 1
        count = min(self.valid_windows, len(self.valid) // apart)
        for places in (torch.arange(count) * (len(self.valid) // count)).split(batch_size):
            yield self._pick(self.valid, places)

    def metric(self) -> BitsPerByte:
        """A fresh metric: bits per token, as a token here is what a byte is to a text."""
        from seqzoo.lab.metrics import BitsPerByte

        return BitsPerByte()

    def describe(self) -> dict[str, object]:
        """What a configuration file keeps of the task."""
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in (self.train, self.valid)))
        return {
            "name": "tokens",
            "seq_len": self.seq_len,
            "valid_windows": self.valid_windows,
            "vocab_size": self.vocab_size,
            "data": self.name,
            "train_shape": list(self.train.shape),
            "valid_shape": list(self.valid.shape),
            "sha256": digest.hexdigest(),
        }

    def _places(self, data: Tensor) -> int:
        """How many windows can be drawn."""
        return len(data) - self.seq_len if data.ndim == 1 else len(data)

    def _pick(self, data: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        rows = data[places] if data.ndim == 2 else data[places[:, None] + torch.arange(self.seq_len + 1)]
        return rows[:, :-1].long(), rows[:, 1:].long()


def load_tokens(path: str | Path | None, seq_len: int | None = None) -> NextToken:
    """Read a .npy file of integers [n] or [N, T + 1]. Raises LabError, or the OSError of a file that cannot be read."""
    if path is None:
        raise LabError("tokens: give a .npy file of integers as data")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise LabError(f"data: {path} is no .npy file of numbers") from error
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise LabError(f"data: expected integers [n] or [N, T + 1] in {path}, got {found}")
    length = seq_len or (DEFAULT_SEQ_LEN if array.ndim == 1 else array.shape[1] - 1)
    if length < 1 or (array.ndim == 2 and length != array.shape[1] - 1):
        raise LabError(
            f"seq_len: {path} has rows of {array.shape[-1]} tokens, so {array.shape[-1] - 1}, got {length}"
        )
    shortest = length + 1 if array.ndim == 1 else 1
    if len(array) < 2 * shortest:
        raise LabError(
            f"data: {path} has {len(array):,} {'tokens' if array.ndim == 1 else 'rows'}, but training and validation "
            f"take {2 * shortest:,}: give more or a smaller seq_len"
        )
    if array.min() < 0 or array.max() >= LARGEST_VOCAB:
        raise LabError(
            f"data: expected tokens 0 to {LARGEST_VOCAB - 1} in {path}, got {array.min()} to {array.max()}"
        )
    cut = len(array) - max(len(array) // VALIDATION_SHARE, shortest)
    tokens = torch.from_numpy(array.astype(np.int32))
    return NextToken(str(path), tokens[:cut], tokens[cut:], length)
