"""One token for each row of a cache, in place: a launch where torch takes fifteen. What it computes is `cache.append_`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .cache import DecayAttentionState, State, slides

SLOTS = 64  # a tile
BLOCK = 1024  # numbers copied at once


@triton.jit(do_not_specialize=["batch", "slots", "seen", "window"])
def append_kernel(
    k_ptr,
    v_ptr,
    gate_ptr,
    old_ptr,
    keys_ptr,
    values_ptr,
    bias_ptr,
    length_ptr,
    position_ptr,
    room_ptr,
    batch,
    slots,
    seen,
    window,
    k_b,
    k_g,
    v_b,
    v_g,
    gate_b,
    keys_b,
    keys_s,
    keys_g,
    values_b,
    values_s,
    values_g,
    G: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of a row's slots; `old` are the lengths before, a copy of those that it writes."""
    tiles = (seen + SLOTS - 1) // SLOTS
    pid = tl.program_id(0)
    tile, b = pid % tiles, (pid // tiles).to(tl.int64)
    newest = tl.load(old_ptr + b)
    j = tile * SLOTS + tl.arange(0, SLOTS)
    position, slot = j.to(tl.int64), newest
    if HAS_WINDOW:  # the remainder of a negative number is negative here
        position = newest - ((newest - j) % window + window) % window
    if SLIDES:
        slot = newest % window
    position = tl.where((position >= 0) & (position <= newest), position, -1)
    tl.store(position_ptr + b * seen + j, position, mask=j < seen)
    if HAS_GATE:
        h = tl.arange(0, BH)
        mask = (j < seen)[:, None] & (h < H)[None, :]
        biases = bias_ptr + (b * slots + j)[:, None] * H + h[None, :]
        gate = tl.load(gate_ptr + b * gate_b + h, mask=h < H, other=0.0).to(bias_ptr.dtype.element_ty)
        bias = tl.load(biases, mask=mask, other=0.0)
        bias = tl.where((position >= 0)[:, None], bias + gate[None, :], bias)
        tl.store(biases, tl.where((j == slot)[:, None], 0.0, bias), mask=mask)
    if (slot >= tile * SLOTS) & (slot < tl.minimum(tile * SLOTS + SLOTS, slots)):
        for i in tl.static_range(0, G * K, BLOCK):
            n = i + tl.arange(0, BLOCK)
            x = tl.load(k_ptr + b * k_b + n // K * k_g + n % K, mask=n < G * K)
            key = keys_ptr + b * keys_b + slot * keys_s + n // K * keys_g + n % K
            tl.store(key, x.to(keys_ptr.dtype.element_ty), mask=n < G * K)
        for i in tl.static_range(0, G * V, BLOCK):
            n = i + tl.arange(0, BLOCK)
            x = tl.load(v_ptr + b * v_b + n // V * v_g + n % V, mask=n < G * V)
            value = values_ptr + b * values_b + slot * values_s + n // V * values_g + n % V
            tl.store(value, x.to(values_ptr.dtype.element_ty), mask=n < G * V)
    if tile == 0:
        tl.store(length_ptr + b, newest + 1)
    if pid == 0:
        longest = newest
        for row in range(batch):
            longest = tl.maximum(longest, tl.load(old_ptr + row))
        tl.store(room_ptr, SLIDES | (longest < slots))


def serves(state: State) -> bool:
    """Whether the kernel can write into it: the numbers of a head side by side, the biases dense."""
    dense = state.bias.is_contiguous() if isinstance(state, DecayAttentionState) else True
    return dense and state.length.is_contiguous() and state.k.stride(-1) == state.v.stride(-1) == 1


def append_(
    state: State, k: Tensor, v: Tensor, log_decay: Tensor | None, window: int, seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of the tokens [B, 1] and of the first `seen` slots [B, seen], and whether there was room [1].

    `seen`: slots behind hold nothing, nor get anything.
    """
    batch, slots, groups, K = state.k.shape
    old = state.length.clone()
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    position = torch.empty(batch, seen, dtype=torch.long, device=k.device)
    if not batch * seen:
        return old[:, None], position, old.new_full((1,), batch == 0, dtype=torch.bool)
    room = old.new_empty(1, dtype=torch.bool)
    bias, gate, heads = state.k, k, 1
    if isinstance(state, DecayAttentionState):
        assert log_decay is not None
        bias, gate, heads = state.bias, log_decay.contiguous(), state.bias.shape[2]
    V = v.shape[3]
    append_kernel[(batch * cdiv(seen, SLOTS),)](
        k, v, gate, old, state.k, state.v, bias, state.length, position, room,
        batch, slots, seen, window,
        k.stride(0), k.stride(2), v.stride(0), v.stride(2), gate.stride(0),
        *state.k.stride()[:3], *state.v.stride()[:3],
        G=groups, H=heads, BH=next_power_of_2(heads), K=K, V=V,
        HAS_GATE=isinstance(state, DecayAttentionState), HAS_WINDOW=window > 0, SLIDES=slides(slots, window),
        SLOTS=SLOTS, BLOCK=min(BLOCK, next_power_of_2(groups * max(K, V))), num_warps=4,
    )  # fmt: skip
    return old[:, None], position, room
