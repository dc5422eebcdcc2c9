"""HGRN2: the gated recurrence with an outer-product state."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqzoo_kernels import gated_linear_attention
from seqzoo_kernels.forget_gate import forget_gate

from ..layers import (
    ShortConv,
    activate,
    check_choice,
    check_divides,
    check_lower_bound,
    largest_divisor,
    lower_bound_of,
    make_norm,
    norm_and_gate,
)
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class HGRN2State(NamedTuple):
    s: Tensor  # [B, H, n, n]
    conv: Tensor  # [B, conv_size - 1, 3 D] the last inputs of the short convolution


@register_mixer("hgrn2", paper="arXiv:2404.07904", op="gated_linear_attention")
class HGRN2(TokenMixer):
    """Gated linear attention whose key is what the forget gate leaves: k = 1 - f (HGRN2).

        q_t = act(x_t W_q)        v_t = act(x_t W_v)        f_t = gamma + (1 - gamma) sigmoid(x_t W_f)
        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T        per head
        y_t = norm(scale * q_t S_t, all heads side by side) W_o

    Shapes: q_t, f_t and v_t are [H, n] with H n = D, S is [H, n, n], all W are [D, D]. State: S, D n numbers, and
    (conv_size - 1) 3 D inputs of the short convolution. Weights: 4 D^2, without biases, norm and convolution. A step costs
    O(D^2 + D n). n = 1 is the elementwise recurrence of HGRU. Projections and convolution start as torch's do; with a lower
    bound of k / L, where layer k of L starts, f is near (1 + k / L) / 2 at first.

    Args:
        dim: width D.
        num_heads: H; the head width is n = D / H. By default n is the largest divisor of D up to 128.
        conv_size: taps of a causal convolution of the three projections, before their activations; 0 for none.
        query_act: "silu" (language models) or "sigmoid" (long-range and recall experiments), or None.
        value_act: None (language models) or "silu".
        norm: "simple_rms" without a scale (language models), "rms", or "layer".
        bias: of the projections.
        scale: of the queries; what norm follows makes it immaterial but for norm_eps.
        lower_bound: gamma where no stack hands one down, in [0, 1); None for no bound, whatever the stack hands down.
        norm_eps: of the norm.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        What others call expand_ratio is the head width n = D / num_heads, no factor of the width. Three recipes are published:
        the defaults (the authors' language models); norm="rms", scale=n^{-1/2}, norm_eps=1e-5 and where wanted conv_size=4
        (flash-linear-attention); and query_act="sigmoid", value_act="silu", norm="layer", norm_eps=1e-5, bias=True (the
        authors' long-range and recall experiments, whose one input projection has the rows of v, q and f in this order). The
        norm is over all heads together, not over each. Language models elsewhere start all matrices as N(0, 0.02^2). The key
        comes from the logits here; others take 1 - exp(log f), which cancels.

    Source: Qin et al. 2024, arXiv:2404.07904.
    """

    reads = {"lower_bound": "channel"}

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        conv_size: int = 0,
        query_act: str | None = "silu",
        value_act: str | None = None,
        norm: str = "simple_rms",
        bias: bool = False,
        scale: float = 1.0,
        lower_bound: float | None = 0.0,
        norm_eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        self.num_heads = dim // largest_divisor(dim, at_most=128) if num_heads is None else num_heads
        check_divides("hgrn2", "num_heads", self.num_heads, dim, "dim")
        check_choice("hgrn2", "query_act", query_act, ("silu", "sigmoid", None))
        check_choice("hgrn2", "value_act", value_act, ("silu", None))
        check_choice("hgrn2", "norm", norm, ("simple_rms", "rms", "layer"))
        check_lower_bound("hgrn2", lower_bound)
        if conv_size < 0:
            raise ValueError(f"hgrn2: expected conv_size >= 0, got {conv_size}.")
        self.query_act, self.value_act, self.scale = query_act, value_act, scale
        self.lower_bound, self.chunk_size = lower_bound, chunk_size
        self.query_proj = nn.Linear(dim, dim, bias=bias)
        self.forget_proj = nn.Linear(dim, dim, bias=bias)
        self.value_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.conv = ShortConv(3 * dim, conv_size) if conv_size else None
        self.conv_tail = max(conv_size - 1, 0)
        self.norm = make_norm(norm, dim, norm_eps)

    def init_state(self, batch: int, capacity: int | None = None) -> HGRN2State:
        width = self.dim // self.num_heads
        return HGRN2State(
            self.zeros(batch, self.num_heads, width, width), self.zeros(batch, self.conv_tail, 3 * self.dim)
        )

    def mix(
        self, x: Tensor, state: HGRN2State, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, HGRN2State]:
        heads = (self.num_heads, self.dim // self.num_heads)
        z, q, v = self.forget_proj(x), self.query_proj(x), self.value_proj(x)
        conv = state.conv
        if self.conv is not None:
            mixed, conv = self.conv(torch.cat([q, z, v], -1), conv, pack, mode)
            q, z, v = mixed.chunk(3, -1)
        q = activate(q, self.query_act)
        log_f, key = forget_gate(z, lower_bound_of(shared, self.lower_bound), dtype=q.dtype)
        o, s = gated_linear_attention(
            q.unflatten(-1, heads),
            key.unflatten(-1, heads),
            activate(v, self.value_act).unflatten(-1, heads),
            log_f.unflatten(-1, heads),
            scale=self.scale,
            initial_state=state.s,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        return self.out_proj(norm_and_gate(self.norm, o.flatten(-2), dtype=x.dtype)), HGRN2State(s, conv)
