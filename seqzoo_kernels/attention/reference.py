"""attention, the ground truth: the whole score matrix, every log-decay a sum over the tokens in between."""

import torch
from torch import Tensor

from ..checks import state_dtype


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    bias: Tensor | None,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
    block: int = 0,
    prune: float = 0.0,
) -> tuple[Tensor]:
    dtype = state_dtype(q.dtype)
    repeats = q.shape[2] // k.shape[2]
    k_, v_ = (x.to(dtype).repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k_) * scale
    scores = scores + total_bias(log_decay, bias, q, k, dtype)
    visible = visible_keys(query_position, key_position, window)[:, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min) if k.shape[1] else 0.0
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    return (torch.einsum("bhij,bjhd->bihd", weights, v_).to(v.dtype),)


def total_bias(
    log_decay: Tensor | None, bias: Tensor | None, q: Tensor, k: Tensor, dtype: torch.dtype
) -> Tensor:
    """[B, H, T, keys]: gates between key and query; `bias` [B, keys, H] is what keys have met before this pass."""
    batch, length, heads, _ = q.shape
    result = q.new_zeros(batch, heads, length, k.shape[1], dtype=dtype)
    if bias is not None:
        result = result + bias.to(dtype).permute(0, 2, 1)[:, :, None]
    if log_decay is None:
        return result
    gates = log_decay.to(dtype).permute(0, 2, 1)[..., None]  # [B, H, s, 1]
    s = torch.arange(length, device=q.device)
    place = torch.arange(k.shape[1], device=q.device) - (
        k.shape[1] - length
    )  # of keys in this pass; older ones < 0
    after = s[:, None] > place
    return result + torch.where(after, gates, torch.zeros_like(gates)).cumsum(2)


def visible_keys(query_position: Tensor, key_position: Tensor, window: int) -> Tensor:
    """[B, T, keys]: at or before the query, at most `window` (0: no limit) positions back, and not dead (-1)."""
    distance = query_position[:, :, None] - key_position[:, None]
    visible = (distance >= 0) & (key_position[:, None] >= 0) & (query_position[:, :, None] >= 0)
    return visible & (distance < window) if window else visible
