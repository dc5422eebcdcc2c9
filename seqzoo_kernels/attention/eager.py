"""attention in plain torch: blocks of queries against all keys that any of them may see.

The parallel mode is one block, the chunked mode blocks of C queries, the recurrent mode blocks of one. The log-decay from a
key to a query is a running sum: what the key has met before the block, plus the gates of the block up to the query.
Backward forms each block's weights again.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import state_dtype
from .reference import visible_keys

WHOLE = 256  # queries that are one block when the mode is "auto" (block 0)
Optional = Tensor | None
Block = tuple[slice, slice, Optional]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    bias: Optional,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
    block: int,
) -> tuple[Tensor]:
    q_, k_, v_ = _by_group(q, k, scale), _by_group(k, k), _by_group(v, k)
    seen = _Seen(query_position, key_position, window)
    out = q_.new_empty(*q_.shape[:-1], v.shape[-1])
    for rows, keys, decay in _blocks(q_, k_, log_decay, bias, block):
        out[..., rows, :] = _weights(q_, k_, seen, rows, keys, decay) @ v_[..., keys, :]
    return (_by_token(out).to(v.dtype),)


def backward(
    grad_out: Tensor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    bias: Optional,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
    block: int,
) -> tuple[Optional, ...]:
    """With weights P and dP = do v^T: dS = P * (dP - rowsum(P * dP)). Rows of dS sum to 0, so the gradient of a gate is
    minus the sum of dS over all keys from it on, and that of `bias` is the column sum of dS."""
    q_, k_, v_ = _by_group(q, k, scale), _by_group(k, k), _by_group(v, k)
    do = _by_group(grad_out, k)
    seen = _Seen(query_position, key_position, window)
    dq, dk, dv = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    # what a gate passes on cancels over many queries and keys: float64 keeps it to the last digit of its terms
    columns = q_.new_zeros(*q_.shape[:3], k.shape[1], dtype=torch.float64)
    for rows, keys, decay in _blocks(q_, k_, log_decay, bias, block):
        weights = _weights(q_, k_, seen, rows, keys, decay)
        do_rows = do[..., rows, :]
        dv[..., keys, :] += (weights.mT @ do_rows).sum(2, keepdim=True)
        d_scores = _softmax_gradient(weights, do_rows @ v_[..., keys, :].mT)
        dq[..., rows, :] = d_scores @ k_[..., keys, :]
        dk[..., keys, :] += (d_scores.mT @ q_[..., rows, :]).sum(2, keepdim=True)
        if log_decay is not None or bias is not None:
            columns[..., keys] += d_scores.sum(-2, dtype=torch.float64)
    columns = columns.flatten(1, 2).mT  # [B, keys, H]
    dg = None
    if log_decay is not None:
        new = columns[:, k.shape[1] - q.shape[1] :]
        dg = -new.flip(1).cumsum(1).flip(1).masked_fill(log_decay == -torch.inf, 0)
        dg = dg.to(log_decay.dtype)
    return (
        (_by_token(dq) * scale).to(q.dtype),
        _by_token(dk).to(k.dtype),
        _by_token(dv).to(v.dtype),
        dg,
        None if bias is None else columns.to(bias.dtype),
        None,
        None,
    )


def _blocks(q: Tensor, k: Tensor, log_decay: Optional, bias: Optional, block: int) -> Iterator[Block]:
    """(queries, keys, log-decay [B, G, R, queries, keys]) of each block; the keys of this pass are the last ones of k."""
    block = block or (WHOLE if q.shape[3] <= WHOLE else WHOLE // 2)
    length, older = q.shape[3], k.shape[3] - q.shape[3]
    heads = q.shape[1:3]
    met = q.new_zeros(q.shape[0], *heads, k.shape[3])
    if bias is not None:
        met += bias.to(q.dtype).mT.unflatten(1, heads)
    gates = None if log_decay is None else log_decay.to(q.dtype).mT.unflatten(1, heads)
    for start in range(0, length, block):
        rows, keys = slice(start, min(start + block, length)), slice(0, older + min(start + block, length))
        if gates is None:
            yield rows, keys, None if bias is None else met[..., None, keys]
            continue
        g = gates[..., rows]
        size = g.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
        inside = g[..., None].expand(*g.shape, size).masked_fill(~later, 0).cumsum(-2)
        before = met[..., None, : older + start] + g.cumsum(-1)[..., None]
        yield rows, keys, torch.cat([before, inside], -1)
        met[..., : older + start] = before[..., -1, :]
        met[..., older + start : keys.stop] = inside[..., -1, :]


class _Seen(NamedTuple):
    """Which keys a query sees follows from these."""

    query_position: Tensor
    key_position: Tensor
    window: int


def _weights(q: Tensor, k: Tensor, visible: "_Seen", rows: slice, keys: slice, decay: Optional) -> Tensor:
    """softmax of the scores [B, G, R, queries, keys]; 0 in a row that sees nothing."""
    scores = q[..., rows, :] @ k[..., keys, :].mT
    if decay is not None:
        scores = scores + decay
    seen = visible_keys(visible.query_position[:, rows], visible.key_position[:, keys], visible.window)[
        :, None, None
    ]
    return scores.masked_fill_(~seen, -torch.inf).softmax(-1).masked_fill_(~seen.any(-1, keepdim=True), 0)


def _softmax_gradient(weights: Tensor, grad: Tensor) -> Tensor:
    """P * (dP - rowsum(P * dP)), whose rows sum to 0: the entry of the largest weight, where rounding would hide that, is made
    minus the sum of the others."""
    if not weights.shape[-1]:
        return grad
    d_scores = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    largest = weights.argmax(-1, keepdim=True)
    d_scores.scatter_(-1, largest, 0)
    return d_scores.scatter_(-1, largest, -d_scores.sum(-1, keepdim=True))


def _by_group(x: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """[B, T, H, K] -> [B, G, R, T, K] in the accumulator's dtype."""
    groups = k.shape[2]
    x = x.to(state_dtype(x.dtype)).transpose(1, 2).unflatten(1, (groups, x.shape[2] // groups))
    return x * scale if scale != 1.0 else x.contiguous()


def _by_token(x: Tensor) -> Tensor:
    return x.flatten(1, 2).transpose(1, 2)
