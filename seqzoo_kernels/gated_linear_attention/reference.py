"""gated_linear_attention, the ground truth: a loop over t, one sequence at a time."""

import torch
from torch import Tensor

from ..checks import state_dtype
from ..sequences import run_each
from ..stepping import split_decay


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    mode: str = "recurrent",
    chunk_size: int = 0,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(q.dtype)
    batch, length, heads, _ = q.shape
    groups, width = k.shape[2:]
    q_, k_, v_ = q.to(dtype) * scale, k.to(dtype), v.to(dtype)
    q_ = q_.unflatten(2, (groups, heads // groups))
    g = torch.zeros_like(k_) if log_decay is None else per_channel(log_decay, batch, length, width).to(dtype)

    def one(t: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
        s = torch.einsum("btgk,btgv->bgkv", k_[:, :0], v_[:, :0]) if state is None else state.to(dtype)
        out = []
        decay, lost = split_decay(g[:, t])
        timed = (decay, lost, *(x[:, t] for x in (q_, k_, v_)))
        steps = list(zip(*(x.unbind(1) for x in timed), strict=True))
        for a, r, q_t, k_t, v_t in reversed(steps) if reverse else steps:
            s = a[..., None] * s + (r[..., None] * s + k_t[..., None] * v_t[..., None, :])
            out.append(torch.einsum("bgrk,bgkv->bgrv", q_t, s).flatten(1, 2))
        if not out:
            return torch.einsum("bthk,btgv->bthv", q[:, t], v[:, t]).to(v.dtype), s.clone()
        return torch.stack(out[::-1] if reverse else out, 1).to(v.dtype), s.clone()

    return run_each(one, length, initial_state, cu_seqlens)


def per_channel(log_decay: Tensor, batch: int, length: int, width: int) -> Tensor:
    """Any form of the decay as [B, T, G, K]."""
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(batch, length, -1)
    return log_decay if log_decay.dim() == 4 else log_decay[..., None].expand(*log_decay.shape, width)
