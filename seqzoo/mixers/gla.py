"""Gated linear attention."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels.checks import check_count, state_dtype

from ..layers import ShortConv, check_choice, check_divides, largest_divisor, make_norm, norm_and_gate
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer
from .linear_attention import FEATURE_MAPS, attend, check_normalizer, features


class GLAState(NamedTuple):
    s: Tensor  # [B, G, K, V]
    z: Tensor  # [B, G, K] decayed sum of the keys; [B, G, 0] without the normaliser
    conv: Tensor  # [B, conv_size - 1, H K + G K + G V] the last inputs of the short convolution


@register_mixer("gla", paper="arXiv:2312.06635", op="gated_linear_attention")
class GLA(TokenMixer):
    """Linear attention with a decay for every key channel, from a low-rank gate (GLA).

        q_t, k_t, v_t = x_t W_q, x_t W_k, x_t W_v        log a_t = log sigmoid(x_t W_1 W_2 + b) / tau
        S_t = diag(a_t) S_{t-1} + k_t v_t^T        o_t = K^{-1/2} q_t S_t        per head
        y_t = (norm(o_t) * silu(x_t W_g)) W_o

    With a feature map phi, phi(q_t) and phi(k_t) stand for q_t and k_t, and with the normaliser
    o_t = phi(q_t) S_t / max(phi(q_t) . z_t, eps) with z_t = a_t z_{t-1} + phi(k_t).

    Shapes: q_t is [H, K], k_t and a_t are [G, K], v_t is [G, V], S is [G, K, V], o_t is [H, V]; H K = expand_k D and
    H V = expand_v D; W_1 is [D, r], W_2 is [r, G K]. State: S, G K V numbers, G K more with the normaliser, and
    (conv_size - 1) (H K + G K + G V) inputs of the short convolution. Weights: 4 D^2 + 24 D by default, without bias and
    norm. A step costs O(D^2 + D K). Projections and convolution start as torch's do, the decay near
    sigmoid(0)^{1/16} = 0.958.

    Args:
        dim: width D.
        num_heads: H; by default the largest divisor of the key and value widths up to 4.
        num_kv_heads: G, heads of k, v and the gate, each shared by H / G heads of q; H by default.
        expand_k: the key width of all heads is expand_k * D.
        expand_v: the value width of all heads is expand_v * D.
        gate_rank: inner width of the gate.
        gate_normalizer: tau.
        log_decay_min: the least that log a_t can be, at most 0; None for no clamp.
        feature_map: phi: "elu", which is elu(u) + 1, "relu", or None for phi(u) = u, which may be negative and so has no
            normaliser.
        normalize: divide by the decayed sum of the weights; with decays of 1 that is `linear_attention`.
        normalizer_eps: eps.
        conv_size: taps of a causal convolution of the queries, keys and values, with a silu; 0 for none.
        norm_eps: of the norm of each head.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        Defaults are those of flash-linear-attention, whose layers keep the state as [V, K], whose clamp_min is log_decay_min
        here, and whose models start all matrices as N(0, 0.02^2). The normaliser is an extension, to compare with
        `linear_attention`; published is the norm of each head in its place. Decays may be as strong as they like: a chunk's
        exponents are sums of the gates between two tokens, where a difference of cumulative sums loses digits or overflows.

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
        log_decay_min: float | None = None,
        feature_map: str | None = None,
        normalize: bool = False,
        normalizer_eps: float = 1e-6,
        conv_size: int = 0,
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
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        check_divides("gla", "num_kv_heads", self.num_kv_heads, self.num_heads, "num_heads")
        check_choice("gla", "feature_map", feature_map, FEATURE_MAPS)
        check_normalizer("gla", normalize, feature_map, normalizer_eps)
        check_count("gla", "gate_rank", gate_rank)
        if not gate_normalizer > 0:
            raise ValueError(f"gla: expected gate_normalizer above 0, got {gate_normalizer}.")
        if log_decay_min is not None and not log_decay_min <= 0:
            raise ValueError(f"gla: expected log_decay_min of at most 0 or None, got {log_decay_min}.")
        if conv_size < 0:
            raise ValueError(f"gla: expected conv_size >= 0, got {conv_size}.")
        self.gate_normalizer, self.log_decay_min, self.chunk_size = gate_normalizer, log_decay_min, chunk_size
        self.feature_map, self.normalize, self.normalizer_eps = feature_map, normalize, normalizer_eps
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
        self.widths = [keys, shared_keys, shared_values]
        self.conv = ShortConv(sum(self.widths), conv_size, "silu") if conv_size else None
        self.conv_tail = max(conv_size - 1, 0)
        self.norm = make_norm("rms", self.head_v, norm_eps)

    def init_state(self, batch: int, capacity: int | None = None) -> GLAState:
        groups = self.num_kv_heads
        return GLAState(
            self.zeros(batch, groups, self.head_k, self.head_v),
            self.zeros(batch, groups, self.head_k if self.normalize else 0),
            self.zeros(batch, self.conv_tail, sum(self.widths)),
        )

    def mix(
        self, x: Tensor, state: GLAState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, GLAState]:
        q, k, v = self.query_proj(x), self.key_proj(x), self.value_proj(x)
        conv = state.conv
        if self.conv is not None:
            mixed, conv = self.conv(torch.cat([q, k, v], -1), conv, pack, mode)
            q, k, v = mixed.split(self.widths, -1)
        q = features(q.unflatten(-1, (self.num_heads, self.head_k)), self.feature_map)
        k = features(k.unflatten(-1, (self.num_kv_heads, self.head_k)), self.feature_map)
        v = v.unflatten(-1, (self.num_kv_heads, self.head_v))
        if (
            self.normalize and x.dtype == torch.float16
        ):  # it overflows where a sum of weights is not divided yet
            q, k, v = q.float(), k.float(), v.float()
        log_decay = self._log_decay(x).unflatten(-1, (self.num_kv_heads, self.head_k))
        eps = self.normalizer_eps if self.normalize else None
        o, s, z = attend(q, k, v, log_decay, state.s, state.z, eps, pack, mode, self.chunk_size)
        gate = self.gate_proj(x).unflatten(-1, (self.num_heads, self.head_v))
        y = norm_and_gate(self.norm, o, gate, "silu", dtype=x.dtype)
        return self.out_proj(y.flatten(-2)), GLAState(s, z, conv)

    def _log_decay(self, x: Tensor) -> Tensor:
        logits = self.decay_proj(x)
        log_decay = F.logsigmoid(logits.to(state_dtype(logits.dtype))) / self.gate_normalizer
        return log_decay if self.log_decay_min is None else log_decay.clamp_min(self.log_decay_min)
