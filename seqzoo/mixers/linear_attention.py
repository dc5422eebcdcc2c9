"""Linear attention: a kernel of features in the place of the softmax."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import gated_linear_attention

from ..layers import check_choice, check_divides, make_norm, norm_and_gate
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer

FEATURE_MAPS = ("elu", "relu", None)


class LinearAttentionState(NamedTuple):
    s: Tensor  # [B, G, K, V]
    z: Tensor  # [B, G, K] sum of the keys; [B, G, 0] without the normaliser


@register_mixer("linear_attention", paper="arXiv:2006.16236", op="gated_linear_attention")
class LinearAttention(TokenMixer):
    """Attention with weights phi(q_i) . phi(k_j), whose sums over the past are a state that never decays.

        q_t, k_t, v_t = x_t W_q, x_t W_k, x_t W_v
        S_t = S_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)        per head
        o_t = phi(q_t) S_t / max(phi(q_t) . z_t, eps)        y_t = o_t W_o

    It is `gla` with decays of 1, without its gates. Shapes: q_t is [H, K], k_t and z are [G, K], v_t is [G, V], S is [G, K, V],
    o_t is [H, V]; H K = expand_k D and H V = expand_v D. State: S and z, G K (V + 1) numbers. Weights: (2 + 2 G / H) D^2 by
    default, without biases. A step costs O(D^2 + D K). Projections start as torch's linear layers do.

    Args:
        dim: width D.
        num_heads: H; by default so many that the key width of a head is the largest possible up to 64.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        expand_k: the key width of all heads is expand_k * D.
        expand_v: the value width of all heads is expand_v * D.
        feature_map: phi: "elu", which is elu(u) + 1 (paper), "relu", or None for phi(u) = u, which may be negative and so has
            no normaliser.
        normalize: divide by the sum of the weights. Without it o_t = K^{-1/2} phi(q_t) S_t grows with t; `norm` bounds it.
        normalizer_eps: eps.
        norm: of each head of o: None (paper), "rms", "simple_rms" without a scale, or "layer".
        bias: of the projections.
        norm_eps: of the norm.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        The authors' code adds eps to the sum of the weights; here eps is the least that the sum can be, so that weights add up
        to 1. elu(u) + 1 is computed as exp(u) for u < 0, which stays positive where the sum rounds to 0. flash-linear-attention
        has no normaliser by default but a norm of each head (normalize=False, norm="rms", bias=False), and other feature maps.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        feature_map: str | None = "elu",
        normalize: bool = True,
        normalizer_eps: float = 1e-6,
        norm: str | None = None,
        bias: bool = True,
        norm_eps: float = 1e-5,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        keys, values = round(expand_k * dim), round(expand_v * dim)
        whole = math.gcd(keys, values)
        fitting = (h for h in range(1, whole) if whole % h == 0 and keys <= 64 * h)
        self.num_heads = next(fitting, whole) if num_heads is None else num_heads
        check_divides("linear_attention", "num_heads", self.num_heads, keys, "expand_k * dim")
        check_divides("linear_attention", "num_heads", self.num_heads, values, "expand_v * dim")
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        check_divides("linear_attention", "num_kv_heads", self.num_kv_heads, self.num_heads, "num_heads")
        check_choice("linear_attention", "feature_map", feature_map, FEATURE_MAPS)
        check_choice("linear_attention", "norm", norm, (None, "rms", "simple_rms", "layer"))
        check_normalizer("linear_attention", normalize, feature_map, normalizer_eps)
        self.feature_map, self.normalize, self.normalizer_eps = feature_map, normalize, normalizer_eps
        self.chunk_size = chunk_size
        self.head_k, self.head_v = keys // self.num_heads, values // self.num_heads
        self.query_proj = nn.Linear(dim, keys, bias=bias)
        self.key_proj = nn.Linear(dim, self.num_kv_heads * self.head_k, bias=bias)
        self.value_proj = nn.Linear(dim, self.num_kv_heads * self.head_v, bias=bias)
        self.out_proj = nn.Linear(values, dim, bias=bias)
        self.norm = None if norm is None else make_norm(norm, self.head_v, norm_eps)

    def init_state(self, batch: int, capacity: int | None = None) -> LinearAttentionState:
        groups = self.num_kv_heads
        return LinearAttentionState(
            self.zeros(batch, groups, self.head_k, self.head_v),
            self.zeros(batch, groups, self.head_k if self.normalize else 0),
        )

    def mix(
        self, x: Tensor, state: LinearAttentionState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, LinearAttentionState]:
        q = features(self.query_proj(x).unflatten(-1, (self.num_heads, self.head_k)), self.feature_map)
        k = features(self.key_proj(x).unflatten(-1, (self.num_kv_heads, self.head_k)), self.feature_map)
        v = self.value_proj(x).unflatten(-1, (self.num_kv_heads, self.head_v))
        if x.dtype == torch.float16:  # it overflows where sums grow with t
            q, k, v = q.float(), k.float(), v.float()
        eps = self.normalizer_eps if self.normalize else None
        o, s, z = attend(q, k, v, None, state.s, state.z, eps, pack, mode, self.chunk_size)
        if self.norm is not None:
            o = norm_and_gate(self.norm, o, dtype=x.dtype)
        return self.out_proj(o.flatten(-2).to(x.dtype)), LinearAttentionState(s, z)


def features(u: Tensor, feature_map: str | None) -> Tensor:
    """phi(u)."""
    if feature_map == "relu":
        return F.relu(u)
    return u if feature_map is None else torch.where(u > 0, u + 1, u.clamp_max(0).exp())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    s: Tensor,
    z: Tensor,
    normalizer_eps: float | None,
    pack: Pack,
    mode: str,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, S and z; with `normalizer_eps` o is divided by max(q . z, eps), z being one more column of S, with values of 1."""
    if normalizer_eps is not None:
        v, s = torch.cat([v, torch.ones_like(v[..., :1])], -1), torch.cat([s, z[..., None]], -1)
    o, s = gated_linear_attention(
        q,
        k,
        v,
        log_decay,
        scale=None if normalizer_eps is None else 1.0,
        initial_state=s,
        cu_seqlens=pack.cu_seqlens,
        max_seqlen=pack.max_seqlen,
        mode=mode,
        chunk_size=chunk_size,
    )
    if normalizer_eps is not None:
        o = o[..., :-1] / o[..., -1:].clamp_min(normalizer_eps)
        s, z = s[..., :-1].contiguous(), s[..., -1].contiguous()
    return o, s, z


def check_normalizer(mixer: str, normalize: bool, feature_map: str | None, eps: float) -> None:
    if normalize and feature_map is None:
        raise ValueError(
            f"{mixer}: expected feature_map 'elu' or 'relu' with normalize, for a sum of weights of either sign can "
            "vanish; got None."
        )
    if not eps > 0:
        raise ValueError(f"{mixer}: expected normalizer_eps above 0, got {eps}.")
