"""The states of all layers, as the cache that transformers hands from step to step."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from seqzoo import LanguageModel, states

from ..held import HeldState

ROOM = 64  # tokens that a growing state gets room for at first


class StateCache(HeldState, Cache):
    """What a seqzoo model has read: a state per layer, of constant size where the mixers' states are."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.offloading = False
        self.state: Any = None
        self.length = 0
        self.room = 0  # tokens that still fit into a state that grows

    def __repr__(self) -> str:
        return f"StateCache(length={self.length})"

    @torch.no_grad()
    def step(self, model: LanguageModel, tokens: Tensor) -> Tensor:
        """Logits [B, vocab_size] of the next token after tokens [B], which the cache then has read, in place."""
        if not self.room:
            self.room = max(ROOM, self.length)
            self.state = states.map_state(torch.clone, model.reserve(self.state, self.room))
        logits, self.state = model.step(tokens, self.state, donate=True)
        self.room -= 1
        return logits

    def read(self, state: Any, columns: int) -> None:
        """Take over a new state after `columns` more tokens."""
        self.state, self.room = state, 0
        self.length += columns

    # what transformers calls

    @property
    def is_linear(self) -> list[bool]:
        """Not what transformers means by it: generate is to hand over the tokens that were not read yet, and no others."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.state, self.length, self.room = None, 0, 0
