"""lstm, the ground truth: a loop over t, one sequence at a time."""

import torch
from torch import Tensor

from ..sequences import run_each
from .cells import CELLS


def forward(
    x: Tensor,
    weight: Tensor,
    peephole: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    variant: str,
    max_seqlen: int | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    cell = CELLS[variant]
    n = weight.shape[0] // cell.blocks

    def one(time: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = x.new_zeros(x.shape[0], (cell.seen + 1) * n)
        seen, c = state.split([cell.seen * n, n], -1)
        out = []
        for x_t in x[:, time].unbind(1):
            a = (x_t + seen @ weight.T).unflatten(-1, (cell.blocks, n))

            def gate(name: str, c: Tensor, a: Tensor = a) -> Tensor | float:
                place = cell.place(name)
                if place is None:
                    return 1.0
                if peephole is None:
                    return torch.sigmoid(a[:, place])
                return torch.sigmoid(a[:, place] + peephole[cell.gates.index(name)] * c)

            i = gate("i", c)
            f = 1 - i if cell.coupled else gate("f", c)
            z = a[:, cell.place("z")]
            c = f * c + i * (torch.tanh(z) if cell.input_tanh else z)
            o = gate("o", c)
            y = o * (torch.tanh(c) if cell.output_tanh else c)
            seen = torch.cat([y, i, f, o], -1) if cell.feedback else y  # type: ignore[list-item]
            out.append(y)
        y = torch.stack(out, 1) if out else x[:, time, :n]
        return y, torch.cat([seen, c], -1)

    return run_each(one, x.shape[1], initial_state, cu_seqlens)
