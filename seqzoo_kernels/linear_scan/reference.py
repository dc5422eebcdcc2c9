"""linear_scan, the ground truth: a loop over t, one sequence at a time."""

import torch
from torch import Tensor

from ..checks import state_dtype
from ..sequences import run_each


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
    decay, residual = split_decay(log_decay, phase)
    dtype = decay.dtype
    h = torch.zeros_like(x[:, :0].sum(1), dtype=dtype) if h is None else h.to(dtype)
    steps = list(zip(decay.unbind(1), residual.unbind(1), x.to(dtype).unbind(1), strict=True))
    out = []
    for a, r, x_t in reversed(steps) if reverse else steps:
        h = a * h + (r * h + x_t)
        out.append(h)
    if not out:
        return x.to(out_dtype(x, phase)), h
    return torch.stack(out[::-1] if reverse else out, 1).to(out_dtype(x, phase)), h


def split_decay(log_decay: Tensor, phase: Tensor | None) -> tuple[Tensor, Tensor]:
    """e^{log_decay + i phase} rounded to the state's dtype, and what the rounding lost.

    Steps with a decay near 1 repeat the same rounding at every t; with the remainder they do not drift.
    """
    dtype = state_dtype(log_decay.dtype)
    exact = log_decay.double().exp()
    if phase is not None:
        exact = torch.polar(exact, phase.double())
        dtype = dtype.to_complex()
    decay = exact.to(dtype)
    return decay, (exact - decay).to(dtype)


def out_dtype(x: Tensor, phase: Tensor | None) -> torch.dtype:
    return x.dtype if phase is None else state_dtype(x.dtype).to_complex()
