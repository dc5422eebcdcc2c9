"""A model whose layers read in both directions in turn, for sequences that are there as a whole, such as images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from seqzoo import LanguageModel


class TwoWayModel(nn.Module):
    """A LanguageModel whose every second layer reads backwards: from the second layer on, each position sees all tokens.

    It has the parameters of the model it wraps. It cannot decode: tokens to come would change what has been said.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> dict[str, Any]:
        """Of the model it wraps."""
        return self.model.config

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Logits [B, T, vocab_size] of tokens [B, T], and no state."""
        backbone = self.model.backbone
        x = self.model.dropout(self.model.embedding(tokens))
        for number, (block, shared) in enumerate(zip(backbone.blocks, backbone._shared(), strict=True)):
            if number % 2:
                x = block(x.flip(1), shared=shared)[0].flip(1)
            else:
                x, _ = block(x, shared=shared)
        return self.model.logits(backbone.norm(x)), None
