"""attention through torch's own scaled_dot_product_attention, where it computes the same thing.

That is a whole causal pass without a decay, and a decoding step, whose cache it reads where it lies.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import total_bias, visible_keys


def refusal(q: Tensor, log_decay: Tensor | None, mode: str, whole: bool, learning: bool) -> str | None:
    """Why it can't serve a call, or None. `whole`: the keys are those of this pass, all of them visible to later queries."""
    if mode != "auto":
        return f"it has no mode {mode!r}, only 'auto'"
    if q.dtype == torch.float64:
        return "it has no second derivative, which float64 inputs are for"
    if q.shape[1] == 1:  # with one key the gradient of q is exactly 0, which a fused kernel's is not
        return "a step's gradients are exact elsewhere" if learning else None
    if whole and log_decay is None:
        return None
    return "it serves a whole causal pass without window, pack, cache or decay, and decoding steps without gradients"


def forward(
    whole: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    bias: Tensor | None,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    mask = None
    if not whole:
        mask = visible_keys(query_position, key_position, window)[:, None]
        if bias is not None or log_decay is not None:
            mask = total_bias(log_decay, bias, q, k, q.dtype).masked_fill(~mask, -torch.inf)
    return attend(q, k, v, scale, mask, causal=whole)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Of q [B, T, H, K] to all of k and v, or to those that the mask [B, H, T, keys] or the causal order leaves."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)
