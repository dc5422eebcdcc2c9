"""Parts that mixers share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import causal_conv1d
from seqzoo_kernels.checks import state_dtype
from seqzoo_kernels.forget_gate import forget_gate
from seqzoo_kernels.gated_norm import gated_norm

from .mixer import Shared
from .packing import Pack

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def activate(x: Tensor, name: str | None) -> Tensor:
    return x if name is None else ACTIVATIONS[name](x)


def check_choice(mixer: str, option: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{mixer}: expected {option} to be one of {', '.join(map(repr, choices))}, got {value!r}."
        )


def check_divides(mixer: str, option: str, value: int, whole: int, of: str) -> None:
    if value < 1 or whole % value:
        raise ValueError(f"{mixer}: expected {option} to divide {of} = {whole}, got {value}.")


def largest_divisor(of: int, *, at_most: int, multiple_of: int = 1) -> int:
    """The largest divisor of `of` up to `at_most` that is a multiple of `multiple_of`: how defaults fit any width."""
    return max(d for d in range(1, at_most + 1) if of % d == 0 and d % multiple_of == 0)


def check_lower_bound(mixer: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"{mixer}: expected lower_bound in [0, 1) or None, got {value!r}.")


def lower_bound_of(shared: Shared, own: float | None) -> Tensor | float | None:
    """The lower bound that the stack hands down, else the mixer's own; None, for no bound at all, stays None."""
    return None if own is None else shared.get("lower_bound", own)


def hgrn_inputs(
    c: Tensor, logits: Tensor, lower_bound: Tensor | float | None, *, forget: bool
) -> tuple[Tensor, Tensor]:
    """The log-decay and the input of HGRN, h_t = decay h_{t-1} + weight silu(c_t), and of its published ablations.

        forget          decay f_t        weight 1 - f_t
        not forget      decay gamma      weight f_t          a decay of 1 where lower_bound is None

    with f of `forget_gate`. c is [B, T, D], or [B, T, D, 2] for complex numbers. A decay that is constant in time is [D]. The
    real input is bfloat16 where c is, which halves what the scan reads and writes; in float16 small weights would round to 0.
    """
    if forget:
        half = c.dtype == torch.bfloat16 and c.dim() == logits.dim()
        return forget_gate(logits, lower_bound, c, activation="silu", dtype=c.dtype if half else None)
    z = logits.to(state_dtype(logits.dtype))
    if lower_bound is None:
        log_decay, weight = z.new_zeros(z.shape[-1]), torch.sigmoid(z)
    else:
        gamma = torch.as_tensor(lower_bound, dtype=z.dtype, device=z.device).expand(z.shape[-1])
        log_decay = gamma.clamp_min(torch.finfo(z.dtype).tiny).log().masked_fill(gamma == 0, -torch.inf)
        weight = gamma + (1 - gamma) * torch.sigmoid(z)
    return log_decay, F.silu(c).to(z.dtype) * (weight if c.dim() == z.dim() else weight[..., None])


def make_norm(kind: str, width: int, eps: float) -> nn.LayerNorm | nn.RMSNorm:
    """RMS norm with a learnt scale ("rms") or without ("simple_rms"), or layer norm ("layer")."""
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps)
    return nn.RMSNorm(width, eps=eps, elementwise_affine=kind == "rms")


def float_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` of a float32 x whose own parameters may be of lower precision: computed in the parameters' dtype."""
    weight = getattr(norm, "weight", None)
    return norm(x if weight is None else x.to(weight.dtype))


def norm_and_gate(
    norm: nn.LayerNorm | nn.RMSNorm,
    h: Tensor,
    gate: Tensor | None = None,
    act: str | None = None,
    position: str = "pre_gate",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """norm(h) * act(gate), or norm(h * act(gate)) for "post_gate", in `dtype`: `gated_norm` by a norm of `make_norm`."""
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    weight, bias = norm.weight, getattr(norm, "bias", None)
    return gated_norm(h, gate, weight, bias, norm=kind, eps=norm.eps, act=act, position=position, dtype=dtype)


def as_real(z: Tensor) -> Tensor:
    """A complex tensor as a real one [..., 2]; a view only without gradients, as an empty strided one breaks the view's."""
    return torch.stack([z.real, z.imag], -1) if z.requires_grad else torch.view_as_real(z)


class ShortConv(nn.Module):
    """Causal depthwise convolution of `size` taps without bias. State: the last size - 1 inputs [B, size - 1, width]."""

    def __init__(self, width: int, size: int, activation: str | None = None) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-1, 1) / math.sqrt(size))

    def forward(self, x: Tensor, state: Tensor, pack: Pack, mode: str) -> tuple[Tensor, Tensor]:
        return causal_conv1d(
            x,
            self.weight,
            activation=self.activation,
            initial_state=state,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
        )


def rotation(position: Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, rotary_dim / 2] of the angles w_j p for `position` [B, T], w_j = base ** (-2 j / rotary_dim).

    Angles are computed in float64, so that far positions keep their phase.
    """
    half = rotary_dim // 2
    frequency = base ** (-torch.arange(half, device=position.device, dtype=torch.float64) / half)
    angle = position[..., None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the first features of x [B, T, H, K], as many as `rotation` was made for, in two halves.

        (a, b) -> (a cos - b sin, a sin + b cos)

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest], -1)
