"""gru, the ground truth: a loop over t, one sequence at a time."""

import torch
from torch import Tensor

from ..sequences import run_each


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    n = weight.shape[1]

    def one(time: slice, h: Tensor | None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], n) if h is None else h
        out = []
        for x_t in x[:, time].unbind(1):
            seen_r, seen_z, seen_h = (h @ weight.T).split(n, -1)
            x_r, x_z, x_h = x_t.split(n, -1)
            r, z = torch.sigmoid(x_r + seen_r), torch.sigmoid(x_z + seen_z)
            new = torch.tanh(x_h + r * (seen_h if bias is None else seen_h + bias))
            h = z * h + (1 - z) * new
            out.append(h)
        return torch.stack(out, 1) if out else x[:, time, :n], h.clone()

    return run_each(one, x.shape[1], initial_state, cu_seqlens)
