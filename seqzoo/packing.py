"""Padding, solved once: a padded batch becomes a pack, in which a padded step cannot touch a state."""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from seqzoo_kernels.packs import take


@dataclasses.dataclass(frozen=True)
class Pack:
    """How the tokens of a call lie, for `TokenMixer.mix`.

    Args:
        cu_seqlens: [N + 1] bounds of N sequences in one row, or None for a plain batch.
        max_seqlen: a bound on the longest sequence, known to the host, or None.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


@dataclasses.dataclass(frozen=True)
class Padding:
    """The permutation that puts the B * T places of a padded batch in one row, tokens first and pads, zeroed, behind.

    Sizes do not depend on the mask, so nothing waits for the device and the call compiles.
    """

    pack: Pack
    mask: Tensor  # [B * T]
    source: Tensor  # [B * T] where each place of the row comes from
    target: Tensor  # [B * T] where each place of the batch goes
    shape: torch.Size  # B, T

    @classmethod
    def of(cls, name: str, mask: Tensor, shape: torch.Size) -> "Padding":
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"{name}: expected mask to be a bool tensor, True where there is a token, got {got}."
            )
        if mask.shape != shape:
            raise ValueError(
                f"{name}: expected mask of shape (B, T) = {tuple(shape)}, got {tuple(mask.shape)}."
            )
        flat = mask.flatten()
        tokens = flat.cumsum(0)
        pads = (~flat).cumsum(0)
        target = torch.where(flat, tokens - 1, flat.sum() + pads - 1)
        source = torch.empty_like(target).scatter_(0, target, torch.arange(flat.shape[0], device=flat.device))
        cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))
        return cls(Pack(cu_seqlens, shape[1]), flat, source, target, shape)

    def join(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, B * T, ...]"""
        return take(x.flatten(0, 1), self.source, self.mask[self.source])[None]

    def split(self, y: Tensor) -> Tensor:
        """[1, B * T, ...] -> [B, T, ...], zeros at pads."""
        return take(y[0], self.target, self.mask).unflatten(0, self.shape)
