"""gated_norm, the ground truth: torch's norms, in float32 or float64."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import state_dtype

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    None: lambda gate: gate,
}


def forward(
    h: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str,
    eps: float,
    act: str | None,
    position: str,
    dtype: torch.dtype,
) -> tuple[Tensor]:
    wide = state_dtype(h.dtype)
    x = real_features(h).to(wide)
    a = None if gate is None else ACTIVATIONS[act](gate.to(wide))
    if a is not None and position == "post_gate":
        x = x * a
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    if norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
        x = x if bias is None else x + bias
    if a is not None and position == "pre_gate":
        x = x * a
    return (x.to(dtype),)


def real_features(h: Tensor) -> Tensor:
    """Of a complex h [..., D] all real parts and then all imaginary ones, [..., 2 D]."""
    return torch.cat([h.real, h.imag], -1) if h.is_complex() else h


def real_shape(h: Tensor) -> torch.Size:
    return torch.Size((*h.shape[:-1], 2 * h.shape[-1])) if h.is_complex() else h.shape
