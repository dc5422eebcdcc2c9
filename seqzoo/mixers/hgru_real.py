"""The real-valued HGRU."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqzoo_kernels import linear_scan

from ..layers import (
    ShortConv,
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


class HGRURealState(NamedTuple):
    h: Tensor  # [B, E D]
    conv: Tensor  # [B, conv_size - 1, 2 E D] the last inputs of the short convolution


@register_mixer("hgru_real", paper="arXiv:2311.04823", op="linear_scan")
class HGRUReal(TokenMixer):
    """Real gated recurrence with a lower-bounded forget gate.

        f_t = gamma + (1 - gamma) sigmoid(x_t W_f)
        h_t = f_t h_{t-1} + (1 - f_t) silu(x_t W_c)
        y_t = (norm(h_t) * act(x_t W_g)) W_o

    Shapes: f_t and h_t are [E D], W_f, W_c and W_g are [D, E D], W_o is [E D, D]; each has a bias by default. State: h, E D
    numbers, and (conv_size - 1) 2 E D inputs of the short convolution. Weights: 4 E D^2, without biases, norm and convolution.
    A step costs O(E D^2), as the projections do. Projections and convolution start as torch's do; with a lower bound of k / L,
    where layer k of L starts, f is near (1 + k / L) / 2 at first.

    Args:
        dim: width D.
        expand: E, the inner width is E D.
        conv_size: taps of a causal convolution of x_t W_c and x_t W_f; 0 for none.
        gate_act: of the output gate: "silu" or "sigmoid".
        norm: "layer" (the authors), "rms", or "simple_rms" without a scale.
        norm_position: "pre_gate", norm(h) * gate, or "post_gate", norm(h * gate).
        forget_gate: False is the published ablation without it: h_t = gamma h_{t-1} + f_t silu(x_t W_c), and with a lower_bound
            of None without any decay: h_t = h_{t-1} + f_t silu(x_t W_c).
        bias: of the projections.
        lower_bound: gamma where no stack hands one down, in [0, 1); None for no bound, whatever the stack hands down.
        norm_eps: of the norm.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        Defaults are those of the authors' hgru-pytorch. Their later real unit, in hgru2-pytorch, is expand=2,
        gate_act="sigmoid", norm_position="post_gate". The HGRN of flash-linear-attention is norm="rms", bias=False, and where
        wanted conv_size=4; its lower bounds have width D, so it takes none with expand > 1, where a bound here has width E D;
        its chunked form takes no packs; and it has 1 - f from f, which cancels near f = 1, where this has it from the logits.

    Source: Qin et al. 2023, arXiv:2311.04823.
    """

    reads = {"lower_bound": "channel"}

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 1,
        conv_size: int = 0,
        gate_act: str = "silu",
        norm: str = "layer",
        norm_position: str = "pre_gate",
        forget_gate: bool = True,
        bias: bool = True,
        lower_bound: float | None = 0.0,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        check_choice("hgru_real", "gate_act", gate_act, ("silu", "sigmoid"))
        check_choice("hgru_real", "norm", norm, ("layer", "rms", "simple_rms"))
        check_choice("hgru_real", "norm_position", norm_position, ("pre_gate", "post_gate"))
        check_lower_bound("hgru_real", lower_bound)
        if expand < 1 or conv_size < 0:
            raise ValueError(
                f"hgru_real: expected expand >= 1 and conv_size >= 0, got {expand} and {conv_size}."
            )
        self.forget_gate = forget_gate
        self.gate_act, self.norm_position = gate_act, norm_position
        self.lower_bound, self.chunk_size = lower_bound, chunk_size
        self.inner = inner = expand * dim
        self.in_proj = nn.Linear(dim, inner, bias=bias)
        self.forget_proj = nn.Linear(dim, inner, bias=bias)
        self.gate_proj = nn.Linear(dim, inner, bias=bias)
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        self.conv = ShortConv(2 * inner, conv_size) if conv_size else None
        self.conv_tail = max(conv_size - 1, 0)
        self.norm = make_norm(norm, inner, norm_eps)

    def shared_dim(self, name: str) -> int:
        return self.inner

    def init_state(self, batch: int, capacity: int | None = None) -> HGRURealState:
        return HGRURealState(self.zeros(batch, self.inner), self.zeros(batch, self.conv_tail, 2 * self.inner))

    def mix(
        self, x: Tensor, state: HGRURealState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, HGRURealState]:
        c, z = self.in_proj(x), self.forget_proj(x)
        conv = state.conv
        if self.conv is not None:
            mixed, conv = self.conv(torch.cat([c, z], -1), conv, pack, mode)
            c, z = mixed.chunk(2, -1)
        bound = lower_bound_of(shared, self.lower_bound)
        h, final = linear_scan(
            *hgrn_inputs(c, z, bound, forget=self.forget_gate),
            initial_state=state.h,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        gate = self.gate_proj(x)
        y = norm_and_gate(self.norm, h, gate, self.gate_act, self.norm_position, dtype=x.dtype)
        return self.out_proj(y), HGRURealState(final, conv)
