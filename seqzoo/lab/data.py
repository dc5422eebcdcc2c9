"""Bytes to train on: read them, part them into training and validation, draw the same batches for everyone."""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seqzoo.lab.errors import LabError

if TYPE_CHECKING:
    from seqzoo.lab.metrics import BitsPerByte

VALIDATION_SHARE = 10  # one byte in ten is held out
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Bytes with a training and a validation part, uint8 [n]; no byte of a validation file is ever trained on."""

    name: str
    train: Tensor
    valid: Tensor

    @property
    def unigram_entropy(self) -> float:
        """Bits per byte of the best model that ignores context, on the validation part: the line to get below."""
        shares = torch.bincount(self.valid.int(), minlength=256).double() / len(self.valid)
        return torch.special.entr(shares).sum().item() / math.log(2)

    @property
    def sha256(self) -> str:
        """Identifies the bytes and how they were parted."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        for part in (self.train, self.valid):
            digest.update(part.numpy().data)
        return digest.hexdigest()

    def describe(self) -> dict[str, object]:
        """What a results folder keeps of the data."""
        return {
            "name": self.name,
            "train_bytes": len(self.train),
            "valid_bytes": len(self.valid),
            "unigram_entropy": self.unigram_entropy,
            "sha256": self.sha256,
        }


def load_text(path: str | Path | None, seq_len: int) -> Text:
    """Read a file, or every text file under a folder, or (``None``) the running Python's own library source.

    A folder is parted by whole files, a single file by position.

    Args:
        path: of the file or folder.
        seq_len: how long a sequence will be: either part holds at least one.

    Raises:
        LabError: there is no text, or too little. OSError: of a file that cannot be read.
    """
    _check_seq_len(seq_len)
    if path is None:
        name = f"Python {platform.python_version()} standard library"
        return _part(name, _read(name, _library_files(Path(sysconfig.get_path("stdlib")))), seq_len)
    path = Path(path)
    if path.is_file():
        return _part(str(path), _read(str(path), [path]), seq_len)
    if path.is_dir():
        return _part(str(path), _read(str(path), _text_files(path)), seq_len)
    raise LabError(
        f"data: {path} is neither a file nor a folder" if path.exists() else f"data: {path} is not there"
    )


def _check_seq_len(seq_len: int) -> None:
    if seq_len < 1:
        raise LabError(f"seq_len: expected 1 or more, got {seq_len}")


def _library_files(folder: Path) -> Iterator[Path]:
    """The library's own modules, without its tests and without what was installed beside it."""
    for path in sorted(folder.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts):
            yield path


def _text_files(folder: Path) -> Iterator[Path]:
    """Every file under ``folder`` in the order of its path, but hidden and binary ones."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            with path.open("rb") as file:
                if b"\0" not in file.read(8192):
                    yield path


def _read(name: str, paths: Iterable[Path]) -> list[bytes]:
    """The files' bytes; a file that is there twice counts once."""
    texts = list(dict.fromkeys(path.read_bytes() for path in paths))
    if not texts:
        raise LabError(f"data: {name} has no text files in it")
    if not any(texts):
        raise LabError(f"data: {name} is empty")
    return texts


def _part(name: str, texts: list[bytes], seq_len: int) -> Text:
    """Hold out whole files where there are enough of them, else the last bytes of the whole."""
    total = sum(map(len, texts))
    shortest = seq_len + 1  # inputs and, shifted by one, targets
    if total < 2 * shortest:
        raise LabError(
            f"data: {name} has {total:,} bytes, but a training and a validation sequence of seq_len={seq_len} take "
            f"{2 * shortest:,}: give more text or a smaller seq_len"
        )
    held_out = _held_out(texts, total)
    train = bytearray().join(text for text in texts if text not in held_out)
    valid = bytearray().join(text for text in texts if text in held_out)
    if min(len(train), len(valid)) < shortest:
        whole = bytearray().join(texts)
        cut = total - max(total // VALIDATION_SHARE, shortest)
        train, valid = whole[:cut], whole[cut:]
    return Text(name, torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8))


def _held_out(texts: list[bytes], total: int) -> set[bytes]:
    """The files for validation, by hash: in that order, each that brings their sum nearer to its share."""
    goal, size, chosen = total / VALIDATION_SHARE, 0, set()
    for text in sorted(texts, key=lambda text: hashlib.sha256(text).digest()):
        if abs(size + len(text) - goal) < abs(size - goal):
            size += len(text)
            chosen.add(text)
    return chosen


@dataclass(frozen=True)
class NextByte:
    """The task of predicting each next byte of a text. What a step trains on depends on (seed, step) alone.

    Args:
        text: the bytes.
        seq_len: tokens in a sequence.
        valid_windows: sequences of the validation part that the metric is taken on.
    """

    text: Text
    seq_len: int
    valid_windows: int = 256

    metric_name = "bits_per_byte"
    vocab_size = 256

    def __post_init__(self) -> None:
        """Refuse what no window can be drawn from."""
        _check_seq_len(self.seq_len)
        if min(len(self.text.train), len(self.text.valid)) <= self.seq_len:
            raise LabError(f"data: {self.text.name} is too short for seq_len={self.seq_len}")

    def train_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] of one step, windows drawn at random."""
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(len(self.text.train) - self.seq_len, size=batch_size)
        return self._windows(self.text.train, torch.from_numpy(starts))

    def valid_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of the validation windows: always the same, evenly spaced, none overlapping."""
        length = len(self.text.valid)
        count = min(self.valid_windows, length // (self.seq_len + 1))
        starts = torch.arange(count) * (length // count)
        for some in starts.split(batch_size):
            yield self._windows(self.text.valid, some)

    def metric(self) -> BitsPerByte:
        """A fresh metric, to be updated with logits and targets."""
        from seqzoo.lab.metrics import BitsPerByte

        return BitsPerByte()

    def describe(self) -> dict[str, object]:
        """What a configuration file keeps of the task."""
        return {
            "name": "next_byte",
            "seq_len": self.seq_len,
            "valid_windows": self.valid_windows,
            "text": self.text.describe(),
        }

    def _windows(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = data[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1], windows[:, 1:]
