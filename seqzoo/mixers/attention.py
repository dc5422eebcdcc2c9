"""Softmax attention."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqzoo_kernels import AttentionState, DecayAttentionState, attention
from seqzoo_kernels.attention import State, reserve
from seqzoo_kernels.checks import check_count, state_dtype
from seqzoo_kernels.packs import locate

from ..layers import check_divides, float_norm, largest_divisor, make_norm, rotate, rotation
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


@register_mixer("attention", paper="arXiv:1706.03762", op="attention")
class Attention(TokenMixer):
    """Causal softmax attention with rotary positions or ALiBi, grouped key heads and a sliding window.

        o_i = sum_{j <= i} softmax_j(K^{-1/2} rot(q_i) . rot(k_j)) v_j        y_i = o_i W_o

    and with `alibi` o_i = sum_{j <= i} softmax_j(K^{-1/2} q_i . k_j - m_h (i - j)) v_j, head h's slope m_h as published:
    2^{-8 h / H} for h = 1 .. H, and if H is no power of 2, the slopes of the power P below it and then every other one of 2 P.

    Shapes: q is [H, K], k and v are [G, K]. State: the rotated keys and the values, 2 G K numbers a token (at most `window`
    tokens), with `alibi` H more; and how many tokens each row has seen, which is where its positions go on. Weights:
    (2 + 2 G / H) D^2. A step costs O(D^2 + t D) at position t. Projections start as torch's linear layers do.

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        qk_norm: RMS-normalise each head of q and k, before the rotation.
        rope: rotate q and k by their positions; by default unless `alibi`.
        rope_base: base of the rotation's frequencies.
        rotary_dim: how many features of a head are rotated; all by default.
        alibi: lower the scores of far keys in proportion to their distance.
        bias: of the projections.
        norm_eps: of qk_norm.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above, such as an odd head width with `rope`.

    Differences:
        Slopes count as gates that are constant in time, so ALiBi's cache keeps what each key has met, and with `rope=True` it
        is added to rotated scores. A window of W is W keys with the query's own, where RecurrentGemma sees W + 1.

    Source: Vaswani et al. 2017, arXiv:1706.03762; rotary positions: Su et al. 2021, arXiv:2104.09864; ALiBi: Press et al. 2021,
    arXiv:2108.12409.
    """

    growth = "linear"
    default_heads: ClassVar[int] = 1  # at least so many, where num_heads is not given

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        rope: bool | None = None,
        rope_base: float = 10000.0,
        rotary_dim: int | None = None,
        alibi: bool = False,
        bias: bool = False,
        norm_eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        name = self.registered_name or "attention"  # its kin share these checks
        check_count(name, "head_dim", head_dim)
        width = head_dim or largest_divisor(dim, at_most=min(64, dim // self.default_heads), multiple_of=2)
        self.num_heads = max(1, dim // width) if num_heads is None else num_heads
        if head_dim is None:
            check_divides(name, "num_heads", self.num_heads, dim, "dim")
        self.head_dim = head_dim or dim // self.num_heads
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        check_divides(name, "num_kv_heads", self.num_kv_heads, self.num_heads, "num_heads")
        rope = not alibi if rope is None else rope
        self.rotary_dim = (rotary_dim or self.head_dim) if rope else 0
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"{name}: rope turns pairs: expected an even rotary_dim of at most head_dim = {self.head_dim}, "
                f"got {self.rotary_dim}."
            )
        if window is not None and window < 1:
            raise ValueError(f"{name}: expected window to be at least 1, got {window}.")
        self.window, self.rope_base, self.chunk_size, self.alibi = window, rope_base, chunk_size, alibi
        self.query_proj = nn.Linear(dim, self.num_heads * self.head_dim, bias=bias)
        self.key_proj = nn.Linear(dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.value_proj = nn.Linear(dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=bias)
        self.query_norm: nn.Module | None = make_norm("rms", self.head_dim, norm_eps) if qk_norm else None
        self.key_norm: nn.Module | None = make_norm("rms", self.head_dim, norm_eps) if qk_norm else None

    def init_state(self, batch: int, capacity: int | None = None) -> Any:
        slots = min(capacity or 0, self.window or capacity or 0)
        shape = (slots, self.num_kv_heads, self.head_dim)
        dtype = self.out_proj.weight.dtype
        length = self.zeros(batch, dtype=torch.long)
        cache = AttentionState(
            self.zeros(batch, *shape, dtype=dtype), self.zeros(batch, *shape, dtype=dtype), length
        )
        return DecayAttentionState(*cache, self.zeros(batch, slots, self.num_heads)) if self.decays else cache

    def reserve(self, state: Any, room: int) -> Any:
        return reserve(state, room, window=self.window)

    def mix(self, x: Tensor, state: Any, *, pack: Pack, mode: str, shared: Shared) -> tuple[Tensor, Any]:
        return self._mix(x, state, pack, mode=mode)

    def mix_in_place(self, x: Tensor, state: Any, *, shared: Shared) -> tuple[Tensor, Any]:
        return self._mix(x, state, Pack(), mode="recurrent", donate=True)

    @property
    def decays(self) -> bool:
        """Whether keys lose weight with what comes after them, and the cache keeps how much."""
        return self.alibi

    def log_decay(self, x: Tensor) -> Tensor | None:
        """[B, T, H], the gates of the tokens x [B, T, D]; None without."""
        if not self.alibi:
            return None
        slopes = alibi_slopes(self.num_heads, state_dtype(x.dtype), x.device)
        return -slopes.expand(*x.shape[:2], -1)

    def _mix(
        self, x: Tensor, state: Any, pack: Pack, *, mode: str, donate: bool = False
    ) -> tuple[Tensor, Any]:
        q, k, v = self._heads(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = float_norm(self.query_norm, q).to(v.dtype), float_norm(self.key_norm, k).to(v.dtype)
        o, cache = self._attend(x, q, k, v, state, pack, mode=mode, donate=donate)
        return self.out_proj(o.flatten(-2)), cache

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.key_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.value_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return q, k, v

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: State,
        pack: Pack,
        *,
        mode: str,
        donate: bool,
    ) -> tuple[Tensor, State]:
        if self.rotary_dim:
            positions = self._positions(x, cache, pack)
            cos, sin = rotation(positions, self.rotary_dim, self.rope_base, state_dtype(q.dtype))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return attention(
            q,
            k,
            v,
            self.log_decay(x),
            window=self.window,
            initial_state=cache,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
            donate=donate,
            copy=False,
        )

    def _positions(self, x: Tensor, cache: State, pack: Pack) -> Tensor:
        if pack.cu_seqlens is None:
            return cache.length[:, None] + torch.arange(x.shape[1], device=x.device)
        tokens = locate(pack.cu_seqlens, x.shape[1])
        if not cache.length.shape[0]:
            return tokens.offset[None]
        return (tokens.offset + cache.length[tokens.sequence])[None]


def alibi_slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[H], the published rule: powers of 2 for the largest power P of 2 up to H, then the odd ones of 2 P's.

    Source: Press et al. 2021, arXiv:2108.12409.
    """
    power = 1 << (num_heads.bit_length() - 1)
    h = torch.arange(num_heads, dtype=dtype, device=device)
    return torch.exp2(torch.where(h < power, -8 * (h + 1), -8 * (h - power) - 4) / power)
