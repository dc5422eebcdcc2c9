"""The linear recurrent unit."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import linear_scan
from seqzoo_kernels.checks import state_dtype

from ..layers import as_real
from ..mixer import ParamRule, Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer

RECURRENT = {"nu_log", "theta_log", "gamma_log", "B_re", "B_im"}


class LRUState(NamedTuple):
    h: Tensor  # [B, N, 2] real and imaginary part


@register_mixer("lru", paper="arXiv:2303.06349", op="linear_scan")
class LRU(TokenMixer):
    """Diagonal complex linear recurrence with constant eigenvalues inside the unit circle (LRU).

        lambda = exp(-e^nu + i e^theta)
        h_t = lambda h_{t-1} + e^gamma (x_t B)        y_t = Re(h_t C) + d x_t

    At the start |lambda|^2 is uniform in [r_min^2, r_max^2] and the phase in [0, max_phase]; gamma starts at
    log sqrt(1 - |lambda|^2), which gives white input unit variance in h. State: h, 2N numbers. Weights: 4 D N + 3 N + D. A step
    costs O(D N). It is linear in x: the block around it brings the nonlinearity. As published, nu, theta, gamma and B train at
    half the learning rate and without weight decay.

    Args:
        dim: width D.
        state_dim: N, by default D.
        r_min: the least |lambda| at the start; 0.9 suits long memory.
        r_max: the greatest; 0.999 suits long memory.
        max_phase: radians a step at the start; pi / 10 suits long memory.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Source: Orvieto et al. 2023, arXiv:2303.06349.
    """

    def __init__(
        self,
        dim: int,
        *,
        state_dim: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"lru: expected 0 <= r_min < r_max <= 1, got {r_min} and {r_max}.")
        self.state_dim = n = state_dim or dim
        self.chunk_size = chunk_size
        tiny = 1e-6  # keeps both logarithms finite
        squared = (torch.rand(n) * (r_max**2 - r_min**2) + r_min**2).clamp(tiny, 1 - tiny)
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(squared)))
        self.theta_log = nn.Parameter(torch.log(max_phase * torch.rand(n).clamp_min(tiny)))
        self.gamma_log = nn.Parameter(0.5 * torch.log1p(-squared))
        self.B_re = nn.Parameter(torch.randn(n, dim) / math.sqrt(2 * dim))
        self.B_im = nn.Parameter(torch.randn(n, dim) / math.sqrt(2 * dim))
        self.C_re = nn.Parameter(torch.randn(dim, n) / math.sqrt(n))
        self.C_im = nn.Parameter(torch.randn(dim, n) / math.sqrt(n))
        self.D = nn.Parameter(torch.randn(dim))

    def init_state(self, batch: int, capacity: int | None = None) -> LRUState:
        return LRUState(self.zeros(batch, self.state_dim, 2))

    def param_rule(self, name: str, parameter: Tensor) -> ParamRule:
        return ParamRule(0.5, decay=False) if name in RECURRENT else super().param_rule(name, parameter)

    def mix(
        self, x: Tensor, state: LRUState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, LRUState]:
        dtype = state_dtype(x.dtype)
        gain = self.gamma_log.to(dtype).exp()
        u = torch.stack(
            [F.linear(x, self.B_re).to(dtype) * gain, F.linear(x, self.B_im).to(dtype) * gain], -1
        )
        h, final = linear_scan(
            -self.nu_log.to(dtype).exp(),
            torch.view_as_complex(u),
            phase=self.theta_log.to(dtype).exp(),
            initial_state=torch.view_as_complex(state.h),
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        y = F.linear(h.real.to(x.dtype), self.C_re) - F.linear(h.imag.to(x.dtype), self.C_im) + self.D * x
        return y, LRUState(as_real(final))
