"""How tokens lie in chunks of C, for a batch of rows and for a pack, whose sequences each begin a chunk of their own."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packs import locate, take

Step = Callable[[int, Tensor], Tensor]


class Table(NamedTuple):
    """The chunks of a pack, each of one sequence: as many as there may be, so that nothing waits for cu_seqlens.

    sequence, first, tokens  [M] whose it is, its first token, and how many it has, 0 for a chunk that is none
    starts                   [N + 1] the first chunk of each sequence, and the end
    """

    sequence: Tensor
    first: Tensor
    tokens: Tensor
    starts: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int, size: int) -> "Table":
        sequences = cu_seqlens.shape[0] - 1
        cu = cu_seqlens.long()
        m = torch.arange(max(1, length // size + sequences), device=cu.device)
        if not sequences:
            nothing = torch.zeros_like(m)
            return cls(nothing, nothing, nothing, cu.new_zeros(1))
        starts = F.pad(((cu[1:] - cu[:-1] + size - 1) // size).cumsum(0), (1, 0))
        sequence = (torch.searchsorted(starts, m, right=True) - 1).clamp(max=sequences - 1)
        first = cu[sequence] + (m - starts[sequence]) * size
        tokens = (cu[sequence + 1] - first).clamp(max=size)
        return cls(sequence, first, torch.where(m < starts[-1], tokens, 0), starts)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """M chunks of C tokens a row. A pack has one row, in chunk m the tokens `index[m]` [C] of sequence `sequence[m]`."""

    length: int
    size: int
    count: int
    cu_seqlens: Tensor | None = None
    index: Tensor | None = None
    valid: Tensor | None = None
    sequence: Tensor | None = None
    slot: Tensor | None = None  # [T] where each token lies in M * C
    has_slot: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> "Chunks":
        length = x.shape[1]
        if cu_seqlens is None:
            size = _power_of_2(min(chunk_size, length))
            return cls(length, size, max(1, -(-length // size)))
        cu, sequences = cu_seqlens.long(), cu_seqlens.shape[0] - 1
        # many short sequences: a chunk no longer than twice their mean wastes little
        size = _power_of_2(min(chunk_size, max(1, 2 * length // max(sequences, 1))))
        pack = Table.of(cu, length, size)
        place = torch.arange(size, device=cu.device)
        index, valid = pack.first[:, None] + place, place < pack.tokens[:, None]
        tokens = locate(cu, length)
        slot = pack.starts[tokens.sequence] * size + tokens.offset
        return cls(length, size, len(index), cu, index, valid, pack.sequence, slot, tokens.valid)

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, H, K] -> [B, H, M, C, K], zeros where no token is."""
        if self.cu_seqlens is not None:
            assert self.index is not None and self.valid is not None
            return take(x[0], self.index, self.valid).permute(2, 0, 1, 3).contiguous()[None]
        missing = self.count * self.size - self.length
        x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.transpose(1, 2).contiguous().unflatten(2, (self.count, self.size))

    def tokens(self, x: Tensor) -> Tensor:
        """[B, H, M, C, K] -> [B, T, H, K]."""
        x = x.flatten(2, 3).transpose(1, 2)
        if self.cu_seqlens is None:
            return x[:, : self.length]
        assert self.slot is not None and self.has_slot is not None
        return take(x[0], self.slot, self.has_slot)[None]

    def states(self, initial: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        """The initial states [B or N, G, 1, K, V]."""
        if initial is not None:
            return initial.to(k.dtype)[:, :, None]
        rows = k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return k.new_zeros(rows, k.shape[1], 1, k.shape[-1], v.shape[-1])

    def walk(self, step: Step, states: Tensor) -> Tensor:
        """Run `step(m, state)` over all chunks, from each sequence's own initial state, to the final states."""
        if self.cu_seqlens is None:
            for m in range(self.count):
                states = step(m, states)
            return states[:, :, 0]
        assert self.sequence is not None and self.valid is not None
        if not states.shape[0]:
            return states[:, :, 0]
        final, state = states.clone(), states[:1]
        begins = F.pad(self.sequence[1:] != self.sequence[:-1], (1, 0), value=True)
        live = self.valid[:, 0]
        for m in range(self.count):
            n = self.sequence[m : m + 1]
            state = step(m, torch.where(begins[m], states[n], state))
            final[n] = torch.where(live[m], state, final[n])
        return final[:, :, 0]

    def carry(self, inputs: Tensor, decay: Tensor | None, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """S' = decay S + inputs from chunk to chunk: the states before and after every chunk, and the final ones.

        `inputs` becomes the states after.
        """
        before = torch.empty_like(inputs)

        def step(m: int, s: Tensor) -> Tensor:
            before[:, :, :, m] = s
            after = inputs[:, :, :, m]
            return after.add_(s) if decay is None else after.addcmul_(decay[:, :, :, m], s)

        return before, inputs, self.walk(step, states)

    def carry_back(self, arriving: Tensor, decay: Tensor | None, grad_final: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the state after every chunk and of the initial states; `arriving` is what a chunk's own outputs
        hand to the state before it."""
        after = torch.empty_like(arriving)
        grad_final = grad_final[:, :, None]

        def step(m: int, grad: Tensor) -> Tensor:
            after[:, :, :, m] = grad
            return arriving[:, :, :, m] + (grad if decay is None else grad * decay[:, :, :, m])

        if self.cu_seqlens is None:
            grad = grad_final
            for m in reversed(range(self.count)):
                grad = step(m, grad)
            return after, grad[:, :, 0].clone()
        assert self.sequence is not None and self.valid is not None
        if not grad_final.shape[0]:
            return after.zero_(), grad_final[:, :, 0].clone()
        initial = grad_final.clone()
        grad = torch.zeros_like(grad_final[:1])
        live = self.valid[:, 0]
        ends = F.pad(self.sequence[1:] != self.sequence[:-1], (0, 1), value=True) | F.pad(
            ~live[1:], (0, 1), value=True
        )
        for m in reversed(range(self.count)):
            n = self.sequence[m : m + 1]
            grad = step(m, torch.where(ends[m], grad_final[n], grad) * live[m])
            initial[n] = torch.where(live[m], grad, initial[n])
        return after, initial[:, :, 0]


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length() if n > 1 else 1
