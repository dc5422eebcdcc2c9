"""A batch for an op that goes from token to token: time first, the sequences of a pack side by side, padded behind."""

import torch
from torch import Tensor

from .packs import locate, longest_sequence, repack, unpack


class Rows:
    """Between [B, T, ...], a batch or a pack, and [L, N, ...]: L steps of N rows.

    What a step makes of the padding is dropped, so it need only be finite.
    """

    def __init__(self, cu_seqlens: Tensor | None, length: int, max_seqlen: int | None) -> None:
        self.cu = cu_seqlens
        self.length = length
        self.longest = length
        if cu_seqlens is not None:
            self.longest = longest_sequence(cu_seqlens, max_seqlen, length)
            self.ends = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
            self.each = torch.arange(self.ends.shape[0], device=cu_seqlens.device)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [L, N, ...]"""
        return (x if self.cu is None else unpack(x, self.cu, self.longest)).transpose(0, 1)

    def join(self, rows: Tensor) -> Tensor:
        """[L, N, ...] -> [B, T, ...], 0 outside every sequence."""
        rows = rows.transpose(0, 1)
        if self.cu is None:
            return rows.clone(memory_format=torch.contiguous_format)
        return repack(rows, locate(self.cu, self.length))

    def last(self, states: Tensor) -> Tensor:
        """The state after each row's last token, of states [L + 1, N, ...] that begin with the initial one."""
        return states[-1] if self.cu is None else states[self.ends, self.each]

    def add_last(self, grads: Tensor, grad_last: Tensor) -> None:
        """The transpose of `last`, added to `grads` [L + 1, N, ...]."""
        if self.cu is None:
            grads[-1] += grad_last
        else:
            grads.index_put_((self.ends, self.each), grad_last, accumulate=True)
