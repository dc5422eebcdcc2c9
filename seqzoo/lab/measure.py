"""What a model costs: parameters, and the speed of decoding a token at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from seqzoo import LanguageModel

WARM_UP = 8  # steps that are not timed


def parameter_count(model: nn.Module) -> int:
    """Numbers that training changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def decode_speed(model: LanguageModel, length: int, *, batch_size: int = 1, repeats: int = 3) -> float:
    """Tokens per second when ``length`` tokens are decoded greedily from an empty context; the best of ``repeats``."""
    was_training = model.training
    model.eval()
    _decode(model, min(length, WARM_UP), batch_size)
    seconds = min(_decode(model, length, batch_size) for _ in range(repeats))
    model.train(was_training)
    return batch_size * length / seconds


def _decode(model: LanguageModel, length: int, batch_size: int) -> float:
    """Seconds that ``length`` steps take."""
    device = next(model.parameters()).device
    state = model.init_state(batch_size, capacity=length)
    tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
    start = time.perf_counter()
    for _ in range(length):
        logits, state = model.step(tokens, state, donate=True)
        tokens = logits.argmax(-1)
    tokens.tolist()  # waits for the device
    return time.perf_counter() - start
