"""Gated linear attention."""

import math
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import gated_linear_attention
from seqzoo_kernels.checks import state_dtype

from ..layers import check_divides, float_norm, largest_divisor, make_norm
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class GLAState(NamedTuple):
    s: Tensor  # [B, G, K, V]


@register_mixer("gla", paper="arXiv:2312.06635", op="gated_linear_attention")
class GLA(TokenMixer):
    """Linear attention with a decay for every key channel, from a low-rank gate (GLA).

        q_t, k_t, v_t = x_t W_q, x_t W_k, x_t W_v        log a_t = log sigmoid(x_t W_1 W_2 + b) / tau
        S_t = diag(a_t) S_{t-1} + k_t v_t^T        o_t = K^{-1/2} q_t S_t        per head
        y_t = (norm(o_t) * silu(x_t W_g)) W_o

    Shapes: q_t is [H, K], k_t and a_t are [G, K], v_t is [G, V], S is [G, K, V], o_t is [H, V]; H K = expand_k D, H V =
    expand_v D; W_1 is [D, r], W_2 is [r, G K]. State: S, G K V numbers. Weights: 4 D^2 + 24 D by default, without bias and
    norm. A step costs O(D^2 + D K). The decay starts near sigmoid(0)^{1/16} = 0.958.

    Args:
        dim: width D.
        num_heads: H; by default the largest divisor of the key and value widths up to 4.
        num_kv_heads: G, heads of k, v and the gate, each shared by H / G heads of q; H by default.
        expand_k: the key width of all heads is expand_k * D.
        expand_v: the value width of all heads is expand_v * D.
        gate_rank: inner width of the gate.
        gate_normalizer: tau.
        norm_eps: of the norm of each head.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        Defaults are those of flash-linear-attention, whose layers keep the state as [V, K]. Decays may be as strong as they
        like: a chunk's exponents are sums of the gates between two tokens, where a difference of cumulative sums loses digits
        or overflows.

    Source: Yang et al. 2023, arXiv:2312.06635.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        keys, values = round(expand_k * dim), round(expand_v * dim)
        self.num_heads = (
            largest_divisor(math.gcd(keys, values), at_most=4) if num_heads is None else num_heads
        )
        check_divides("gla", "num_heads", self.num_heads, keys, "expand_k * dim")
        check_divides("gla", "num_heads", self.num_heads, values, "expand_v * dim")
        self.num_kv_heads = num_kv_heads or self.num_heads
        check_divides("gla", "num_kv_heads", self.num_kv_heads, self.num_heads, "num_heads")
        self.gate_normalizer, self.chunk_size = gate_normalizer, chunk_size
        self.head_k, self.head_v = keys // self.num_heads, values // self.num_heads
        shared_keys, shared_values = self.num_kv_heads * self.head_k, self.num_kv_heads * self.head_v
        self.query_proj = nn.Linear(dim, keys, bias=False)
        self.key_proj = nn.Linear(dim, shared_keys, bias=False)
        self.value_proj = nn.Linear(dim, shared_values, bias=False)
        self.decay_proj = nn.Sequential(
            nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, shared_keys)
        )
        self.gate_proj = nn.Linear(dim, values, bias=False)
        self.out_proj = nn.Linear(values, dim, bias=False)
        self.norm = make_norm("rms", self.head_v, norm_eps)

    def init_state(self, batch: int, capacity: int | None = None) -> GLAState:
        return GLAState(self.zeros(batch, self.num_kv_heads, self.head_k, self.head_v))

    def mix(
        self, x: Tensor, state: GLAState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, GLAState]:
        decay = self.decay_proj(x)
        log_decay = F.logsigmoid(decay.to(state_dtype(decay.dtype))) / self.gate_normalizer
        o, s = gated_linear_attention(
            self.query_proj(x).unflatten(-1, (self.num_heads, self.head_k)),
            self.key_proj(x).unflatten(-1, (self.num_kv_heads, self.head_k)),
            self.value_proj(x).unflatten(-1, (self.num_kv_heads, self.head_v)),
            log_decay.unflatten(-1, (self.num_kv_heads, self.head_k)),
            initial_state=state.s,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        y = float_norm(self.norm, o).flatten(-2) * F.silu(self.gate_proj(x))
        return self.out_proj(y.to(x.dtype)), GLAState(s)
