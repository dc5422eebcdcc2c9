"""causal_conv1d, the ground truth: each token from a window of its own."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import state_dtype
from ..sequences import run_each


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(x.dtype)
    taps = weight.shape[1]
    w = weight.to(dtype)

    def one(t: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
        part = x[:, t]
        before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if state is None else state
        line = torch.cat([before.to(torch.promote_types(before.dtype, x.dtype)), part], 1)
        out = [(line[:, i : i + taps].to(dtype) * w.T).sum(1) for i in range(part.shape[1])]
        y = torch.stack(out, 1) if out else part.to(dtype)
        y = y if bias is None else y + bias.to(dtype)
        return (F.silu(y) if silu else y).to(x.dtype), line[:, line.shape[1] - taps + 1 :].to(
            before.dtype
        ).clone()

    return run_each(one, x.shape[1], initial_state, cu_seqlens)
