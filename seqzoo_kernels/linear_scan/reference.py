"""linear_scan, the ground truth: a loop over t, one sequence at a time."""

import torch
from torch import Tensor

from ..checks import state_dtype
from ..sequences import run_each
from ..stepping import split_decay


def forward(
    log_decay: Tensor,
    x: Tensor,
    phase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    mode: str = "recurrent",
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    constant = log_decay.dim() == 1
    batch, length, width = x.shape
    log_decay = log_decay.expand(batch, length, width) if constant else log_decay
    if phase is not None:
        phase = phase.expand(batch, length, width)

    def one(t: slice, h: Tensor | None) -> tuple[Tensor, Tensor]:
        return _scan(log_decay[:, t], x[:, t], None if phase is None else phase[:, t], h, reverse)

    return run_each(one, length, initial_state, cu_seqlens)


def _scan(
    log_decay: Tensor, x: Tensor, phase: Tensor | None, h: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    decay, lost = split_decay(log_decay, phase)
    dtype = decay.dtype
    h = torch.zeros_like(x[:, :0].sum(1), dtype=dtype) if h is None else h.to(dtype)
    steps = list(zip(decay.unbind(1), lost.unbind(1), x.to(dtype).unbind(1), strict=True))
    out = []
    for a, r, x_t in reversed(steps) if reverse else steps:
        h = a * h + (r * h + x_t)
        out.append(h)
    if not out:
        return x.to(out_dtype(x, phase)), h.clone()
    return torch.stack(out[::-1] if reverse else out, 1).to(out_dtype(x, phase)), h


def out_dtype(x: Tensor, phase: Tensor | None) -> torch.dtype:
    return x.dtype if phase is None else state_dtype(x.dtype).to_complex()
