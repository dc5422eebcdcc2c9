"""Bytes for torchtitan: each batch a function of the seed and its number."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from seqzoo.lab.data import NextByte, load_text


class ByteTokenizer(BaseTokenizer):
    """A token is a byte of the text in UTF-8; there is no file to read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, tokenizer_path: str = "") -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class ByteLoader(BaseDataLoader):
    """Windows of a text, those of `seqzoo train`: `dataset_path` is a file or a folder, or None for Python's own library.

    A batch over all processes depends on the seed and its number alone, and the number is in the checkpoints.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`seed` is that of the batches."""

        seed: int = 0

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        self.task = NextByte(load_text(config.dataset_path, seq_len), seq_len)
        self.seed, self.batch_size = config.seed, local_batch_size * dp_world_size
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.batch = 0  # the number of the next one

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            inputs, targets = self.task.train_batch(self.batch, self.batch_size, self.seed)
            self.batch += 1
            yield {"input": inputs[self.rows]}, targets[self.rows]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = int(state_dict["batch"])
