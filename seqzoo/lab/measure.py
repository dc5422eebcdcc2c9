"""What a model costs: parameters, memory, and the speed of decoding a token at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from seqzoo import LanguageModel

WARM_UP = 8  # steps that are not timed
STEPS_AT_A_CONTEXT = 32


class AtContext(NamedTuple):
    """What one sequence costs once it has ``context`` tokens."""

    context: int
    state_bytes: int
    training_bytes: int  # of the tensors that a forward pass keeps for the backward pass, weights left out
    decode_tokens_per_second: float


def parameter_count(model: nn.Module) -> int:
    """Numbers that training changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def decode_speed(model: LanguageModel, length: int, *, batch_size: int = 1, repeats: int = 3) -> float:
    """Tokens per second when ``length`` tokens are decoded greedily from an empty context; the best of ``repeats``."""
    was_training = model.training
    model.eval()
    _decode(model, model.init_state(batch_size, capacity=WARM_UP), min(length, WARM_UP), batch_size)
    seconds = min(
        _decode(model, model.init_state(batch_size, capacity=length), length, batch_size)
        for _ in range(repeats)
    )
    model.train(was_training)
    return batch_size * length / seconds


def costs_at(model: LanguageModel, contexts: Sequence[int], *, repeats: int = 3) -> tuple[AtContext, ...]:
    """The costs at each context length; the speed is the best of ``repeats``."""
    return tuple(
        AtContext(
            context,
            model.state_size(context),
            training_memory(model, context),
            _decode_speed_after(model, context, repeats),
        )
        for context in contexts
    )


def training_memory(model: LanguageModel, length: int) -> int:
    """Bytes that a forward pass over one sequence keeps for the backward pass, each storage once, weights left out.

    Counted, not read from the machine: the same on every run and on every device that takes the same backend.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no storage is freed and its place used again

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@torch.no_grad()
def _decode_speed_after(model: LanguageModel, context: int, repeats: int) -> float:
    """Tokens per second of the steps that follow ``context`` tokens."""
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, context, dtype=torch.long, device=next(model.parameters()).device)
    _, read = model(tokens)
    seconds = [
        _decode(model, model.reserve(read, STEPS_AT_A_CONTEXT), STEPS_AT_A_CONTEXT, 1) for _ in range(repeats)
    ]
    model.train(was_training)
    return STEPS_AT_A_CONTEXT / min(seconds)


def _decode(model: LanguageModel, state: Any, length: int, batch_size: int) -> float:
    """Seconds that ``length`` steps take; they consume the state."""
    tokens = torch.zeros(batch_size, dtype=torch.long, device=next(model.parameters()).device)
    start = time.perf_counter()
    for _ in range(length):
        logits, state = model.step(tokens, state, donate=True)
        tokens = logits.argmax(-1)
    tokens.tolist()  # waits for the device
    return time.perf_counter() - start
