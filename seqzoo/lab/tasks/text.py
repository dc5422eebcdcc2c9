"""Text, and sequences of tokens in a file."""

from __future__ import annotations

from pathlib import Path

from seqzoo.lab.compare import Comparison
from seqzoo.lab.data import NextByte, load_text
from seqzoo.lab.tasks.registry import register_task
from seqzoo.lab.tokens import NextToken, load_tokens
from seqzoo.lab.train import TrainConfig

TEXT = Comparison(training=TrainConfig(steps=250))


@register_task("text", TEXT)
def text(*, seq_len: int = 128, data: str | Path | None = None) -> NextByte:
    """Each next byte of a text: of a file, of a folder, or by default of Python's own library source."""
    return NextByte(load_text(data, seq_len), seq_len)


@register_task("tokens", TEXT)
def tokens(*, seq_len: int | None = None, data: str | Path | None = None) -> NextToken:
    """Each next token of an array of integers, a .npy file: [n], one long sequence, or [N, T + 1], one a row."""
    return load_tokens(data, seq_len)
