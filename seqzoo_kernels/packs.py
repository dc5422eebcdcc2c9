"""Index arithmetic of packs, with static sizes: no `nonzero`, no wait for the device, and it compiles.

A pack is one row of T tokens and `cu_seqlens` [N + 1]: sequence n is the tokens cu_seqlens[n] <= t < cu_seqlens[n + 1].
Sequences may be empty, and tokens outside cu_seqlens[0] .. cu_seqlens[-1] belong to none.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """For every token of a pack: its sequence [T], its place in it [T], and whether it has one [T]."""

    sequence: Tensor
    offset: Tensor
    valid: Tensor


def locate(cu_seqlens: Tensor, length: int) -> Tokens:
    cu = cu_seqlens.long()
    t = torch.arange(length, device=cu.device)
    sequence = torch.searchsorted(cu, t, right=True) - 1
    valid = (sequence >= 0) & (t < cu[-1])
    sequence = sequence.clamp(0, max(cu.shape[0] - 2, 0))
    return Tokens(sequence, t - cu[sequence], valid)


def take(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """``x[index]`` along the first axis where `valid`, 0 elsewhere, whatever stands there. x may be empty."""
    if x.shape[0] == 0:
        return x.new_zeros(*index.shape, *x.shape[1:])
    return x[index.clamp(0, x.shape[0] - 1)].masked_fill(~beside(valid, x), 0)


def beside(condition: Tensor, x: Tensor) -> Tensor:
    """A condition for each entry x[i], shaped to be broadcast with it."""
    return condition.reshape(condition.shape + (1,) * (x.dim() - 1))


def unpack(x: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """A pack [1, T, ...] as rows [N, longest, ...] with zeros on the right."""
    cu = cu_seqlens.long()
    place = torch.arange(longest, device=x.device)
    index = cu[:-1, None] + place
    return take(x[0], index, index < cu[1:, None])


def repack(rows: Tensor, tokens: Tokens) -> Tensor:
    """The rows [N, longest, ...] of `unpack` as a pack [1, T, ...] again, zeros where no sequence is."""
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros(1, tokens.valid.shape[0], *rows.shape[2:])
    flat = rows.flatten(0, 1)
    return take(
        flat, tokens.sequence * rows.shape[1] + tokens.offset.clamp(0, rows.shape[1] - 1), tokens.valid
    )[None]


def longest_sequence(cu_seqlens: Tensor, max_seqlen: int | None, length: int) -> int:
    """A bound on the longest sequence known to the host: `max_seqlen`, else read where that is free, else all tokens."""
    if max_seqlen is not None:
        return min(int(max_seqlen), length)
    if cu_seqlens.device.type != "cpu" or cu_seqlens.shape[0] < 2 or torch.compiler.is_compiling():
        return length
    if type(cu_seqlens) is not Tensor:  # a traced tensor has no values to read
        return length
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
