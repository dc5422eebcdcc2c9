"""Sums of gates inside a chunk, built by joining halves, so that no exponent is ever a difference.

A chunk of C gates (C a power of 2) is cut into halves down to single tokens. For a query i in the second half of a block
and a key j in its first half, the log-decay from j to i is

    suffix_j  (gates after j to the end of the first half)  +  prefix_i  (gates from the start of the second half to i)

two sums <= 0, exact for gates of -inf and of -1e-6 in one chunk. Joining two halves adds the total of the one to the
prefixes or suffixes of the other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class Sums:
    """Prefix sums (with the token itself) and suffix sums (without it) of gates [..., C, K] within blocks of growing size.

    Iterate over `levels()`; when they are done, `prefix` and `suffix` are those of the whole chunk.
    """

    def __init__(self, gates: Tensor) -> None:
        self.prefix = gates.clone()
        self.suffix = torch.zeros_like(gates)

    def levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For m = 1, 2, ... C / 2: (m, prefix of the second halves, suffix of the first), [..., C / 2m, m, K]."""
        size = self.prefix.shape[-2]
        half = 1
        while half < size:
            (first, second), (first_suffix, _) = (
                halves(self.prefix, half),
                halves(self.suffix, half),
            )
            yield half, second, first_suffix
            totals = first[..., -1:, :].clone(), second[..., -1:, :].clone()
            second += totals[0]
            first_suffix += totals[1]
            half *= 2


def halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second halves of all blocks of 2 * half tokens in [..., C, K]: [..., C / 2half, half, K]."""
    blocks = x.unflatten(-2, (x.shape[-2] // (2 * half), 2, half))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def corner(square: Tensor, half: int) -> Tensor:
    """View of what second halves read of first halves in [..., C, C]: [..., C / 2half, queries, keys]."""
    blocks = square.shape[-1] // (2 * half)
    cells = square.unflatten(-1, (blocks, 2, half)).unflatten(-4, (blocks, 2, half))
    return cells[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def pair_decay(gates: Tensor | None, like: Tensor) -> Tensor:
    """e^{gates j+1 .. i} for j <= i, 0 above the diagonal: gates [..., C, 1] -> [..., C, C]. None is no decay."""
    size = like.shape[-2]
    if gates is None:
        return like.new_ones(size, size).tril()
    logs = gates.new_full((*gates.shape[:-2], size, size), -torch.inf)
    logs.diagonal(dim1=-2, dim2=-1).zero_()
    for half, prefix, suffix in Sums(gates).levels():
        corner(logs, half).copy_(prefix + suffix.mT)
    return logs.exp_()
