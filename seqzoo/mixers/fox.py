"""The Forgetting Transformer's attention (FoX), its Pro form, and the same without a forget gate."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels.attention import State
from seqzoo_kernels.checks import state_dtype
from seqzoo_kernels.packs import beside, locate, take

from ..layers import check_choice
from ..mixer import Shared
from ..packing import Pack
from ..registry import register_mixer
from .attention import Attention

FORGET_GATES = ("full", "bias_only", "fixed", None)


@register_mixer("fox", paper="arXiv:2503.02130", op="attention")
class FoX(Attention):
    """Softmax attention whose keys lose weight with every forget gate after them: the Forgetting Transformer (FoX).

        f_t = sigmoid(x_t W_f + b_f)        one number a head
        o_i = sum_{j <= i} softmax_j(K^{-1/2} q_i . k_j + log f_{j+1} + ... + log f_i) v_j        y_i = o_i W_o

    There are no positions by default: gates tell near from far. A gate of 1 is softmax attention, a constant one is ALiBi, and
    one of 0 starts again.

    Shapes: q is [H, K], k and v are [G, K], f is [H]. State: keys, values and the sum of the log f that each key has met,
    2 G K + H numbers a token (at most `window` tokens), and how many tokens each row has seen. Weights:
    (2 + 2 G / H) D^2 + H D. A step costs O(D^2 + t D) at position t. Weights start as N(0, 0.02^2) and b_f at 0, so that f is
    near 0.5.

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64, at least 2.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        forget_gate: "full" as above, "bias_only" without W_f, "fixed" with a b_f that is not learnt either, or None for a gate
            of 1.
        decay_time_min: 1 / -log f of the first head at the start, in tokens, where the gate is "bias_only" or "fixed".
        decay_time_max: that of the last head; the others' lie between, evenly in their logarithm.
        rope: rotate q and k by their positions.
        rope_base: base of the rotation's frequencies.
        rotary_dim: how many features of a head are rotated; all by default.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above, such as an odd head width with `rope`.

    Differences:
        The authors' code has neither grouped heads nor a window. It has no default for the decay times, and lets the gate
        "bias_only" start at b_f = 0 too.

    Source: Lin et al. 2025, arXiv:2503.02130.
    """

    default_heads = 2  # that differ in how far they see

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        forget_gate: str | None = "full",
        decay_time_min: float = 2.0,
        decay_time_max: float = 1024.0,
        rope: bool = False,
        rope_base: float = 500000.0,
        rotary_dim: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            rope=rope,
            rope_base=rope_base,
            rotary_dim=rotary_dim,
            chunk_size=chunk_size,
        )
        name = self.registered_name or "fox"
        check_choice(name, "forget_gate", forget_gate, FORGET_GATES)
        if not 0 < decay_time_min <= decay_time_max < math.inf:
            raise ValueError(
                f"{name}: expected 0 < decay_time_min <= decay_time_max, got {decay_time_min} and {decay_time_max}."
            )
        self.forget_gate, self.decay_times = forget_gate, (decay_time_min, decay_time_max)
        if forget_gate == "full":
            self.forget_proj = nn.Linear(dim, self.num_heads)
        elif forget_gate == "bias_only":
            decay = 1 / self._decay_time(torch.float64, None)
            self.forget_bias = nn.Parameter(-torch.expm1(decay).log().float())
        self.apply(_start)

    @property
    def decays(self) -> bool:
        return self.forget_gate is not None

    def log_decay(self, x: Tensor) -> Tensor | None:
        dtype = state_dtype(x.dtype)
        if self.forget_gate is None:
            return None
        if self.forget_gate == "full":
            return F.logsigmoid(self.forget_proj(x).to(dtype))
        if self.forget_gate == "bias_only":
            constant = F.logsigmoid(self.forget_bias.to(dtype))
        else:
            constant = -1 / self._decay_time(dtype, x.device)
        return constant.expand(*x.shape[:2], -1)

    def _decay_time(self, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        first, last = map(math.log, self.decay_times)
        return torch.linspace(first, last, self.num_heads, dtype=dtype, device=device).exp()


class FoXProState(NamedTuple):
    cache: State
    shift: Tensor  # [B, 1, 2 G, K] the last token's keys and values, as they were before the shift


@register_mixer("fox_pro", paper="arXiv:2503.02130", op="attention")
class FoXPro(FoX):
    """FoX in its Pro block: shifted keys and values, normalised queries and keys, a norm and a gate of the output.

        a_t = sigmoid(x_t W_a)        k_t = a_t (x_{t-1} W_k) + (1 - a_t) (x_t W_k)        v_t likewise, with its own a_t
        o_i = sum_{j <= i} softmax_j(K^{-1/2} norm(q_i) . norm(k_j) + log f_{j+1} + ... + log f_i) v_j        f as in `fox`
        y_t = (norm(o_t) * sigmoid(x_t W_g)) W_o

    Each norm is an RMS norm of every head, with a scale for every channel of every head.

    Shapes: q and o are [H, K], k and v are [G, K], a is [G] for each of k and v, f is [H]. State: that of `fox`, and 2 G K
    numbers for the shift. Weights: (3 + 2 G / H) D^2 + (H + 2 G) D, without biases and norms. A step costs O(D^2 + t D) at
    position t. Weights start as N(0, 0.02^2), so that a and the gates are near 0.5.

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64, at least 2.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        forget_gate: "full", "bias_only", "fixed" or None, as in `fox`.
        decay_time_min: as in `fox`.
        decay_time_max: as in `fox`.
        rope: rotate q and k by their positions, behind the norm.
        rope_base: base of the rotation's frequencies.
        rotary_dim: how many features of a head are rotated; all by default.
        norm_eps: of the norms.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        The authors' code starts the shift from 0 in a call of several tokens that goes on from a state; here it goes on from
        the token before. Its norms of q and k have an eps of 1e-5, and in the published checkpoints one scale for all heads,
        which the authors call a mistake. flash-linear-attention's layer has neither the shift nor the norm of the output.

    Source: Lin et al. 2025, arXiv:2503.02130.
    """

    query_norm: "HeadNorm"
    key_norm: "HeadNorm"

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        forget_gate: str | None = "full",
        decay_time_min: float = 2.0,
        decay_time_max: float = 1024.0,
        rope: bool = False,
        rope_base: float = 500000.0,
        rotary_dim: int | None = None,
        norm_eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            forget_gate=forget_gate,
            decay_time_min=decay_time_min,
            decay_time_max=decay_time_max,
            rope=rope,
            rope_base=rope_base,
            rotary_dim=rotary_dim,
            chunk_size=chunk_size,
        )
        heads, groups, width = self.num_heads, self.num_kv_heads, self.head_dim
        self.shift_proj = nn.Linear(dim, 2 * groups, bias=False)
        self.gate_proj = nn.Linear(dim, heads * width, bias=False)
        self.query_norm = HeadNorm(heads, width, norm_eps)
        self.key_norm = HeadNorm(groups, width, norm_eps)
        self.norm = HeadNorm(heads, width, norm_eps)
        self.apply(_start)

    def init_state(self, batch: int, capacity: int | None = None) -> FoXProState:
        cache = super().init_state(batch, capacity)
        return FoXProState(cache, self.zeros(batch, 1, 2 * self.num_kv_heads, self.head_dim))

    def reserve(self, state: FoXProState, room: int) -> FoXProState:
        return state._replace(cache=super().reserve(state.cache, room))

    def mix_in_place(self, x: Tensor, state: FoXProState, *, shared: Shared) -> tuple[Tensor, FoXProState]:
        y, new = super().mix_in_place(x, state, shared=shared)
        return y, new._replace(shift=state.shift.copy_(new.shift))

    def _mix(
        self, x: Tensor, state: FoXProState, pack: Pack, *, mode: str, donate: bool = False
    ) -> tuple[Tensor, FoXProState]:
        q, k, v = self._heads(x)
        fresh = torch.cat([k, v], -2).to(state.shift.dtype)
        before, shift = token_shift(fresh, state.shift, pack)
        share = torch.sigmoid(self.shift_proj(x).to(fresh.dtype))
        shifted_k, shifted_v = fresh.lerp(before, share[..., None]).chunk(2, -2)
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(shifted_k).to(v.dtype)
        o, cache = self._attend(x, q, k, shifted_v.to(v.dtype), state.cache, pack, mode=mode, donate=donate)
        y = self.norm(o).flatten(-2) * torch.sigmoid(self.gate_proj(x))
        return self.out_proj(y.to(x.dtype)), FoXProState(cache, shift)


@register_mixer("transformer_pro", paper="arXiv:2503.02130", op="attention")
class TransformerPro(FoXPro):
    """The Pro block around softmax attention: `fox_pro` without the forget gate, with rotary positions.

        a_t = sigmoid(x_t W_a)        k_t = a_t (x_{t-1} W_k) + (1 - a_t) (x_t W_k)        v_t likewise, with its own a_t
        o_i = sum_{j <= i} softmax_j(K^{-1/2} rot(norm(q_i)) . rot(norm(k_j))) v_j
        y_t = (norm(o_t) * sigmoid(x_t W_g)) W_o

    Beside `fox_pro` it shows what the gate is worth. Shapes: q and o are [H, K], k and v are [G, K], a is [G] for each of k and
    v. State: keys and values, 2 G K numbers a token (at most `window` tokens), as many for the shift, and how many tokens each
    row has seen. Weights: (3 + 2 G / H) D^2 + 2 G D, without norms. A step costs O(D^2 + t D) at position t. Weights start as
    N(0, 0.02^2).

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64, at least 2.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        rope_base: base of the rotation's frequencies.
        rotary_dim: how many features of a head are rotated; all by default.
        norm_eps: of the norms.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above, such as an odd head width.

    Differences:
        As in `fox_pro`.

    Source: Lin et al. 2025, arXiv:2503.02130.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rope_base: float = 500000.0,
        rotary_dim: int | None = None,
        norm_eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            forget_gate=None,
            rope=True,
            rope_base=rope_base,
            rotary_dim=rotary_dim,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
        )


class HeadNorm(nn.Module):
    """RMS norm of each head of x [..., H, K], in float32 (float64 for float64), with a scale [H K]."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps, self.shape = eps, (num_heads, head_dim)
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x.to(state_dtype(x.dtype)), self.shape[1:], eps=self.eps)
        return x * self.weight.unflatten(0, self.shape)


def token_shift(x: Tensor, last: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    """The token before each token of x [B, T, ...], and the last one of each row: `last` [B, 1, ...] of the call before."""
    if pack.cu_seqlens is None:
        line = torch.cat([last, x], 1)
        return line[:, :-1], line[:, -1:].clone(memory_format=torch.contiguous_format)
    tokens = locate(pack.cu_seqlens, x.shape[1])
    earlier = torch.cat([torch.zeros_like(x[0, :1]), x[0]])[:-1]
    first = (tokens.offset == 0) & tokens.valid
    before = torch.where(beside(first, x[0]), take(last[:, 0], tokens.sequence, first), earlier)
    cu = pack.cu_seqlens.long()
    some = cu[1:] > cu[:-1]
    ends = take(x[0], cu[1:] - 1, some)[:, None]
    return before[None], torch.where(beside(some, ends), ends, last)


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
