"""The state of attention: keys and values so far, in slots.

The token at position p lies in slot p, with a window of W in slot p % W; softmax does not mind the order. Rows may hold
different numbers of tokens. Dead slots are 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packs import take

FULL = "attention: the cache is full"


class AttentionState(NamedTuple):
    """k [B, S, G, K], v [B, S, G, V], length [B]: tokens ever seen."""

    k: Tensor
    v: Tensor
    length: Tensor


class DecayAttentionState(NamedTuple):
    """AttentionState with bias [B, S, H]: the gates a token has met so far, summed. A running sum keeps the weights of
    recent tokens exact however long the sequence; a difference of cumulative sums would not."""

    k: Tensor
    v: Tensor
    length: Tensor
    bias: Tensor


State = AttentionState | DecayAttentionState


def slot_positions(length: Tensor, slots: int, window: int) -> Tensor:
    """[B, S]: the position of the token in each slot, -1 for a dead one."""
    slot = torch.arange(slots, device=length.device)
    newest = length[:, None] - 1
    position = newest - (newest - slot) % window if window else slot.expand(length.shape[0], slots)
    return torch.where((position >= 0) & (position <= newest), position, -1)


def extend(
    old: State,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    log_decay: Tensor | None,
    window: int,
    copy: bool,
) -> State:
    """The state after a pass: `k`, `v` [B, T, ...] of which `added` [B] tokens of each row are real, the first ones; None: all.

    `log_decay` [B, T, H] is 0 behind them. Without `copy` the state may be k and v themselves.
    """
    slots = old.k.shape[1]
    length = old.length + (k.shape[1] if added is None else added)
    after = None
    if log_decay is not None:
        assert isinstance(old, DecayAttentionState)
        # On a GPU torch adds up the last axis in parallel, any other one number after the other.
        gates = log_decay.to(old.bias.dtype).transpose(1, 2)
        # padded before it is cut: a tensor of T - 1 tokens would bind an exported T
        after = F.pad(gates, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1).transpose(1, 2).contiguous()
    if added is None and not slots and not window:
        dense = torch.contiguous_format  # of a copy that is made at all
        keys = k.to(old.k.dtype, copy=copy, memory_format=dense).contiguous()
        values = v.to(old.v.dtype, copy=copy, memory_format=dense).contiguous()
        return _state(keys, values, length, after)
    total = slots + k.shape[1]
    if window:
        total = torch.sym_min(total, window)
    position = slot_positions(length, total, window)
    is_new = position >= old.length[:, None]
    index = torch.where(is_new, slots + position - old.length[:, None], torch.arange(total, device=k.device))
    rows = torch.arange(k.shape[0], device=k.device)[:, None] * (slots + k.shape[1])

    def choose(before: Tensor, new: Tensor) -> Tensor:
        new = new.to(before.dtype)
        both = torch.cat([before, new], 1) if slots else new
        return take(both.flatten(0, 1), rows + index, position >= 0)

    bias = None
    if after is not None:
        assert isinstance(old, DecayAttentionState) and log_decay is not None
        bias = choose(old.bias + log_decay.to(old.bias.dtype).sum(1, keepdim=True), after)
    return _state(choose(old.k, k), choose(old.v, v), length, bias)


def _state(k: Tensor, v: Tensor, length: Tensor, bias: Tensor | None) -> State:
    return AttentionState(k, v, length) if bias is None else DecayAttentionState(k, v, length, bias)


def reserve(state: State, room: int, *, window: int | None = None) -> State:
    """The state with slots for `room` more tokens in every row, which `attention(..., donate=True)` can fill.

    Slots are added behind, and only those that the longest row will need; it is read from the device once. With a window
    of W there are never more than W: fewer than W slots mean that no token was dropped, so each lies in the slot of its
    position and stays there. Without anything to add the state is returned as it is.

    Raises:
        ValueError: `room` is negative.
    """
    if room < 0:
        raise ValueError(f"attention: expected room to be at least 0, got {room}.")
    batch, slots = state.k.shape[:2]
    wanted = room + (int(state.length.max()) if batch else slots)
    extra = (min(wanted, window) if window else wanted) - slots
    if extra <= 0:
        return state

    def grow(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(batch, extra, *t.shape[2:])], 1)

    grown = AttentionState(grow(state.k), grow(state.v), state.length.clone())
    return DecayAttentionState(*grown, grow(state.bias)) if isinstance(state, DecayAttentionState) else grown


def tokens_held(length: Tensor) -> tuple[int, int] | None:
    """The fewest and the most tokens that a row holds, where reading them waits for nothing: on a CPU."""
    if length.device.type != "cpu" or torch.compiler.is_compiling() or not length.shape[0]:
        return None
    fewest, most = length.aminmax()
    return int(fewest), int(most)


def append_(state: State, k: Tensor, v: Tensor, log_decay: Tensor | None, window: int) -> None:
    """`extend` by one token for each row, written into `state`'s own memory, which has room for it."""
    slots = state.k.shape[1]
    slot = state.length % window if slides(slots, window) else state.length
    rows = torch.arange(k.shape[0], device=k.device)
    if isinstance(state, DecayAttentionState):
        assert log_decay is not None
        live = slot_positions(state.length, slots, window) >= 0
        state.bias.add_(torch.where(live[..., None], log_decay.to(state.bias.dtype), 0))
        # not bias[rows, slot] = 0: a number assigned by index is copied from the host, which waits for the device
        state.bias.scatter_(1, slot[:, None, None].expand(-1, 1, state.bias.shape[2]), 0)
    state.k[rows, slot] = k[:, 0].to(state.k.dtype)
    state.v[rows, slot] = v[:, 0].to(state.v.dtype)
    state.length.add_(1)


def slides(slots: int, window: int) -> bool:
    """Whether a token takes the slot of the one that leaves the window, so that there is always room."""
    return bool(window) and slots >= window


def has_room(state: State, window: int) -> Tensor:
    """Whether `append_` finds a slot in every row, on the device."""
    slots = state.k.shape[1]
    if slides(slots, window):
        return torch.ones((), dtype=torch.bool, device=state.k.device)
    return (state.length < slots).all()


def check_room(state: State, window: int, held: tuple[int, int]) -> None:
    """The same as an error, given what `tokens_held` says."""
    slots = state.k.shape[1]
    if held[1] >= slots and not slides(slots, window):
        raise ValueError(
            f"{FULL}: it has {slots} slots and a row holds {held[1]} tokens. "
            "Ask for more with init_state(batch, capacity=...) or reserve(state, room), or step without donate."
        )
