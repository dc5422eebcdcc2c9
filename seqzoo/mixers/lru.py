"""The linear recurrent unit, and the same with a forget gate."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import linear_scan
from seqzoo_kernels.checks import check_count, state_dtype
from seqzoo_kernels.forget_gate import forget_gate

from ..layers import as_real, check_choice
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

    Shapes: h_t and lambda are complex [N], B is complex [D, N], C is complex [N, D], d is [D]. State: h, 2 N numbers. Weights:
    4 D N + 3 N + D. A step costs O(D N). It is linear in x: the block around it brings the nonlinearity. At the start
    |lambda|^2 is uniform in [r_min^2, r_max^2] and the phase in [0, max_phase]; gamma is log sqrt(1 - |lambda|^2), which gives
    white input unit variance in h; both parts of B are N(0, 1 / 2 D), those of C N(0, 1 / N), and d is N(0, 1). As published,
    nu, theta, gamma and B train at half the learning rate and without weight decay, and C and d as usual:
    `param_groups` says so to an optimiser.

    Args:
        dim: width D.
        state_dim: N, by default D.
        r_min: the least |lambda| at the start; 0.9 suits long memory.
        r_max: the greatest; 0.999 suits long memory.
        max_phase: radians a step at the start; pi / 10 suits long memory.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        Parameters have the names and shapes of minimal-LRU, a reference implementation in JAX: B_re and B_im are [N, D], C_re
        and C_im are [D, N]. As there, eigenvalues come without their conjugates, and y has no factor 2 for them. What surrounds
        the recurrence there (norm, GELU, GLU, dropout, a skip) is not part of the mixer. |lambda|^2 and the phase start at
        least 1e-6 away from where their logarithms are infinite.

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
            raise ValueError(
                f"{self.registered_name}: expected 0 <= r_min < r_max <= 1, got {r_min} and {r_max}."
            )
        if not max_phase > 0:
            raise ValueError(f"{self.registered_name}: expected max_phase above 0, got {max_phase}.")
        check_count(str(self.registered_name), "state_dim", state_dim)
        self.state_dim = n = dim if state_dim is None else state_dim
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
        if name in RECURRENT:
            return ParamRule(0.5, decay=False)
        if name == "D":  # the one vector that decays, as in the authors' groups
            return ParamRule()
        return super().param_rule(name, parameter)

    def _decay_and_gain(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """log |lambda| and the factor of x_t B, [N] or [B, T, N]."""
        return -self.nu_log.to(dtype).exp(), self.gamma_log.to(dtype).exp()

    def mix(
        self, x: Tensor, state: LRUState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, LRUState]:
        dtype = state_dtype(x.dtype)
        log_decay, gain = self._decay_and_gain(x, dtype)
        u = torch.stack(
            [F.linear(x, self.B_re).to(dtype) * gain, F.linear(x, self.B_im).to(dtype) * gain], -1
        )
        h, final = linear_scan(
            log_decay,
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


@register_mixer("lru_forget", paper="arXiv:2311.04823", op="linear_scan")
class LRUForget(LRU):
    """LRU whose modulus is the lower bound of a forget gate (LRU with forget gate).

        m = exp(-e^nu)        m_t = m + (1 - m) sigmoid(x_t A)
        h_t = m_t e^{i e^theta} h_{t-1} + e^gamma (x_t B)        y_t = Re(h_t C) + d x_t

    This is the baseline that the authors of HGRN describe in their answer to its reviewers. Shapes: as in `lru`; m_t is [N] and
    A is [D, N]. State: h, 2 N numbers. Weights: 5 D N + 3 N + D. A step costs O(D N). Parameters start and train as those of
    `lru`, with |lambda| = m; A trains as usual and starts as a linear layer's. Without input m_t is (1 + m) / 2.

    Args:
        dim: width D.
        state_dim: N, by default D.
        r_min: the least m at the start.
        r_max: the greatest.
        max_phase: radians a step at the start.
        gamma: "static", a parameter that starts at log sqrt(1 - m^2) (as published): with m near 1 and zero logits the gate
            then doubles the state's variance. "dynamic", an extension: e^gamma is sqrt(1 - m_t^2) of each token, and there
            is no parameter.
        gate_bias: None for none (as published), or where a bias of x_t A starts, an extension; -4 starts near LRU.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        No code was released. As described, the gain e^gamma stays what it was without the gate, so that the state's variance
        grows where the gate opens, and A has no bias. gamma="dynamic" and gate_bias are extensions of this package.

    Source: the public reviews of Qin et al. 2023, arXiv:2311.04823; Orvieto et al. 2023, arXiv:2303.06349. "dynamic" is the
    gain of De et al. 2024, arXiv:2402.19427.
    """

    def __init__(
        self,
        dim: int,
        *,
        state_dim: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        gamma: str = "static",
        gate_bias: float | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim, state_dim=state_dim, r_min=r_min, r_max=r_max, max_phase=max_phase, chunk_size=chunk_size
        )
        check_choice("lru_forget", "gamma", gamma, ("static", "dynamic"))
        self.gamma = gamma
        if gamma == "dynamic":
            del self.gamma_log
        self.forget_proj = nn.Linear(dim, self.state_dim, bias=gate_bias is not None)
        if gate_bias is not None:
            nn.init.constant_(self.forget_proj.bias, gate_bias)

    def _decay_and_gain(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rate = self.nu_log.to(dtype).exp()
        logits = self.forget_proj(x)
        log_decay, open_part = forget_gate(logits, torch.exp(-rate), open_part=-torch.expm1(-rate))
        if self.gamma == "static":
            return log_decay, self.gamma_log.to(dtype).exp()
        # log(1 - m_t), finite where that underflows
        log_open = (-torch.expm1(-rate)).log() + F.logsigmoid(-logits.to(dtype))
        return log_decay, torch.exp(0.5 * (log_open + torch.log(2 - open_part)))
