"""gated_norm in plain torch, which differentiates it: torch's own norms, in the dtype of the weight."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import ACTIVATIONS, real_features


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
    a = None if gate is None else ACTIVATIONS[act](gate)
    x = real_features(h)
    if a is not None and position == "post_gate":
        x = x * a
    x = x if weight is None else x.to(weight.dtype)
    if norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
        x = x if bias is None else x + bias
    if a is not None and position == "pre_gate":
        x = x * a
    return (x.to(dtype),)
