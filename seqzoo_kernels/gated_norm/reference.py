"""gated_norm, the ground truth: the formula, in float32 or float64."""

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
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        x = x * weight.to(wide)
    if bias is not None:
        x = x + bias.to(wide)
    if a is not None and position == "pre_gate":
        x = x * a
    return (x.to(dtype),)


def real_features(h: Tensor) -> Tensor:
    """Of a complex h [..., D] all real parts and then all imaginary ones, [..., 2 D]."""
    return torch.cat([h.real, h.imag], -1) if h.is_complex() else h


def real_shape(h: Tensor) -> torch.Size:
    return torch.Size((*h.shape[:-1], 2 * h.shape[-1])) if h.is_complex() else h.shape
