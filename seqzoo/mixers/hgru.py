"""HGRU, the complex recurrent unit of HGRN."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqzoo_kernels import linear_scan
from seqzoo_kernels.checks import check_count

from ..layers import (
    as_real,
    check_choice,
    check_lower_bound,
    hgrn_inputs,
    lower_bound_of,
    make_norm,
    norm_and_gate,
)
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class HGRUState(NamedTuple):
    h: Tensor  # [B, D, 2] real and imaginary part


@register_mixer("hgru", paper="arXiv:2311.04823", op="linear_scan")
class HGRU(TokenMixer):
    """Complex gated recurrence with a lower-bounded forget gate and a learnt phase per channel (HGRN).

        c_t = silu(x_t W_c + b_c), read as D complex numbers
        f_t = gamma + (1 - gamma) sigmoid(x_t W_f + b_f)
        h_t = f_t e^{i theta} h_{t-1} + (1 - f_t) c_t
        y_t = (norm([Re h_t, Im h_t]) * act(x_t W_g + b_g)) W_o + b_o

    Shapes: c_t and h_t are complex [D], f_t and theta are [D], W_f is [D, D], W_c and W_g are [D, 2 D], W_o is [2 D, D]. State:
    h, 2 D numbers. Weights: 7 D^2 + D, without biases and norm. A step costs O(D^2), as the projections do. With low-rank gates
    W_f and W_g are products of two: 4 D^2 + 5 D r weights for rank r. The phase starts at theta_j = 10000^{-2j/D} with j
    from 0, projections as torch's linear layers do; with a lower bound of k / L, where layer k of L starts, f is near
    (1 + k / L) / 2 at first.

    Args:
        dim: width D.
        gate_rank: inner width of the forget gate's and the output gate's projections; None for one matrix each, as in the
            released code, where versions 2 and 3 have 128.
        gate_act: of the output gate: "silu" (released code) or "sigmoid" (its versions 2 and 3).
        norm_position: "pre_gate", norm(h) * gate (released code), or "post_gate", norm(h * gate) (paper, version 3).
        forget_gate: False is the published ablation without it: h_t = gamma e^{i theta} h_{t-1} + f_t c_t, and with a
            lower_bound of None without any decay: h_t = e^{i theta} h_{t-1} + f_t c_t.
        bias: of the projections.
        lower_bound: gamma where no stack hands one down, in [0, 1); None for no bound, whatever the stack hands down.
        norm_eps: of the layer norm.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        The authors' released code normalises before the gate and their paper after it; the default is the code's. The two
        numbers of a channel are side by side in W_c's output, and all real parts before all imaginary ones in W_g and W_o, as
        in that code. Its language models sum the lower bounds one layer later than the paper: see `LowerBounds`. Its routine
        for one token refers to a variable that it never sets, so it can't be compared with. 1 - f comes from the logits here,
        and from f there. The HGRN layer of flash-linear-attention is the real unit, `hgru_real`.

    Source: Qin et al. 2023, arXiv:2311.04823.
    """

    reads = {"lower_bound": "channel"}

    def __init__(
        self,
        dim: int,
        *,
        gate_rank: int | None = None,
        gate_act: str = "silu",
        norm_position: str = "pre_gate",
        forget_gate: bool = True,
        bias: bool = True,
        lower_bound: float | None = 0.0,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        check_choice("hgru", "gate_act", gate_act, ("silu", "sigmoid"))
        check_choice("hgru", "norm_position", norm_position, ("pre_gate", "post_gate"))
        check_lower_bound("hgru", lower_bound)
        check_count("hgru", "gate_rank", gate_rank)
        self.forget_gate = forget_gate
        self.gate_act, self.norm_position = gate_act, norm_position
        self.lower_bound, self.chunk_size = lower_bound, chunk_size
        self.in_proj = nn.Linear(dim, 2 * dim, bias=bias)
        self.forget_proj = _projection(dim, gate_rank, dim, bias)
        self.gate_proj = _projection(dim, gate_rank, 2 * dim, bias)
        self.out_proj = nn.Linear(2 * dim, dim, bias=bias)
        self.phase = nn.Parameter(10000.0 ** (-2.0 * torch.arange(dim) / dim))
        self.norm = make_norm("layer", 2 * dim, norm_eps)

    def init_state(self, batch: int, capacity: int | None = None) -> HGRUState:
        return HGRUState(self.zeros(batch, self.dim, 2))

    def mix(
        self, x: Tensor, state: HGRUState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, HGRUState]:
        bound = lower_bound_of(shared, self.lower_bound)
        c = self.in_proj(x).unflatten(-1, (self.dim, 2))
        log_decay, u = hgrn_inputs(c, self.forget_proj(x), bound, forget=self.forget_gate)
        h, final = linear_scan(
            log_decay,
            torch.view_as_complex(u),
            phase=self.phase,
            initial_state=torch.view_as_complex(state.h),
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        gate = self.gate_proj(x)
        y = norm_and_gate(self.norm, h, gate, self.gate_act, self.norm_position, dtype=x.dtype)
        return self.out_proj(y), HGRUState(as_real(final))


def _projection(width: int, rank: int | None, out: int, bias: bool) -> nn.Module:
    if rank is None:
        return nn.Linear(width, out, bias=bias)
    return nn.Sequential(nn.Linear(width, rank, bias=bias), nn.Linear(rank, out, bias=bias))
