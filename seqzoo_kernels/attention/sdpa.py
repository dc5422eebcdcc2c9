"""attention through torch's own scaled_dot_product_attention, where it computes the same thing.

That is a whole causal pass without a decay, and a decoding step, whose cache it reads where it lies.
"""

from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .reference import total_bias, visible_keys

# That of q is 0, which a fused kernel's is not.
ONE_KEY = "the gradients of one key are exact elsewhere"
# cuDNN's kernels: half precision, heads up to 128. It plans each shape that it meets anew, which a short pass does not repay.
CUDNN_DTYPES = (torch.float16, torch.bfloat16)
CUDNN_WIDEST_HEAD = 128
CUDNN_SHORTEST = 128  # queries
FASTEST_FIRST = [  # on an H200; torch goes on to the next where one refuses, as cuDNN does a deterministic backward pass
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def refusal(q: Tensor, log_decay: Tensor | None, mode: str, whole: bool, learning: bool) -> str | None:
    """Why it can't serve a call, or None. `whole`: the keys are those of this pass, all of them visible to later queries."""
    if mode != "auto":
        return f"it has no mode {mode!r}, only 'auto'"
    if q.dtype == torch.float64:
        return "it has no second derivative, which float64 inputs are for"
    if q.shape[1] == 1:
        return ONE_KEY if learning else None
    if whole and log_decay is None:
        return None
    return "it serves a whole causal pass without window, pack, cache or decay, and decoding steps without gradients"


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
) -> Tensor:
    """A step: what it sees is in a mask."""
    mask = visible_keys(query_position, key_position, window)[:, None]
    if bias is not None or log_decay is not None:
        mask = total_bias(log_decay, bias, q, k, q.dtype).masked_fill(~mask, -torch.inf)
    return attend(q, k, v, scale, mask)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Of q [B, T, H, K] to all of k and v, or to those that the mask [B, H, T, keys] or the causal order leaves."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def run() -> Tensor:
        options: dict[str, Any] = {}
        if q.shape[1] != k.shape[1]:  # in a traced graph of any shape the comparison itself is no bool yet
            options["enable_gqa"] = True
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **options
        )
        return out.transpose(1, 2)

    if not causal or not _suits_cudnn(q, v) or not _all_are_enabled():
        return run()
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return run()


def _suits_cudnn(q: Tensor, v: Tensor) -> bool:
    """Of [B, H, T, K] on a GPU. A traced graph serves any T."""
    return (
        q.is_cuda
        and q.dtype in CUDNN_DTYPES
        and max(q.shape[-1], v.shape[-1]) <= CUDNN_WIDEST_HEAD
        and (torch.compiler.is_compiling() or q.shape[2] >= CUDNN_SHORTEST)
    )


@torch.compiler.assume_constant_result
def _all_are_enabled() -> bool:
    """Else the choice is the user's, and torch would not give its order back as it was."""
    return (
        cuda.cudnn_sdp_enabled()
        and cuda.flash_sdp_enabled()
        and cuda.mem_efficient_sdp_enabled()
        and cuda.math_sdp_enabled()
    )
