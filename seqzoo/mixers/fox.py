"""Forgetting attention: softmax attention whose keys fade with the forget gates after them, and its Pro block."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import causal_conv1d
from seqzoo_kernels.attention import State, reserve
from seqzoo_kernels.checks import state_dtype

from ..layers import check_choice, float_norm
from ..mixer import Shared
from ..packing import Pack
from ..registry import register_mixer
from .attention import Attention

GATES = ("full", "bias_only", "fixed", None)


class ForgetGate(nn.Module):
    """log f [B, T, H] of x [B, T, D], in float32 (float64 for float64).

        "full"          f_t = sigmoid(x_t W_f + b)       W_f ~ N(0, 0.02), b = 0: f starts near 1/2
        "bias_only"     f = sigmoid(b), b learnt         starts at exp(-1 / tau)
        "fixed"         f = exp(-1 / tau)

    The decay times tau_h, in tokens, lie evenly in the logarithm between `fastest` and `slowest`.
    """

    def __init__(self, dim: int, num_heads: int, kind: str, fastest: float, slowest: float) -> None:
        super().__init__()
        self.num_heads, self.fastest, self.slowest = num_heads, fastest, slowest
        self.proj = nn.Linear(dim, num_heads) if kind == "full" else None
        self.bias = nn.Parameter(torch.empty(num_heads)) if kind == "bias_only" else None
        with torch.no_grad():
            if self.proj is not None:
                self.proj.weight.normal_(std=0.02)
                self.proj.bias.zero_()
            if self.bias is not None:
                self.bias.copy_(-torch.expm1(self._rates(self.bias)).log())

    def forward(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        if self.proj is not None:
            return F.logsigmoid(self.proj(x).to(dtype))
        constant = -self._rates(x) if self.bias is None else F.logsigmoid(self.bias.to(dtype))
        return constant.to(dtype).expand(*x.shape[:2], -1)

    def _rates(self, like: Tensor) -> Tensor:
        """1 / tau [H]; computed on the device, as a constant tensor would lose digits in a half model."""
        ends = math.log(self.fastest), math.log(self.slowest)
        return torch.linspace(*ends, self.num_heads, dtype=torch.float64, device=like.device).neg().exp()


@register_mixer("fox", paper="arXiv:2503.02130", op="attention")
class Fox(Attention):
    """Softmax attention with a forget gate a head (the Forgetting Transformer, FoX); no positions beside it.

        f_t = sigmoid(x_t W_f + b)        y_i = o_i W_o        per head
        o_i = sum_{j <= i} softmax_j(K^{-1/2} q_i . k_j + log f_{j+1} + ... + log f_i) v_j

    State: that of `attention`, and H numbers a token, the sums of the gates it has met. Weights: (2 + 2 G / H) D^2 + D H.
    A step costs O(D^2 + t D) at position t.

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        forget_gate: "full", of x; "bias_only", constant and learnt; "fixed", constant; None, f = 1.
        decay_time_min: tokens in which the first head falls to 1 / e: at the start of "bias_only", of "fixed" for good.
        decay_time_max: of the last head; those between lie evenly in the logarithm. The defaults are this zoo's.
        qk_norm: RMS-normalise each head of q and k.
        rope: rotate q and k by their positions.
        rope_base: base of the rotation's frequencies.
        bias: of the projections; the gate always has one.
        norm_eps: of the norms.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above, such as an odd head width with `rope`.

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
        forget_gate: str | None = "full",
        decay_time_min: float = 2.0,
        decay_time_max: float = 1024.0,
        qk_norm: bool = False,
        rope: bool = False,
        rope_base: float = 500000.0,
        bias: bool = False,
        norm_eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            qk_norm=qk_norm,
            rope=rope,
            rope_base=rope_base,
            bias=bias,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
        )
        name = self.registered_name or type(self).__name__
        check_choice(name, "forget_gate", forget_gate, GATES)
        if not 0 < decay_time_min <= decay_time_max < math.inf:
            raise ValueError(
                f"{name}: expected 0 < decay_time_min <= decay_time_max, got {decay_time_min} and {decay_time_max}."
            )
        self.decays = forget_gate is not None
        self.forget = (
            None
            if forget_gate is None
            else ForgetGate(dim, self.num_heads, forget_gate, decay_time_min, decay_time_max)
        )

    def _log_decay(self, x: Tensor) -> Tensor | None:
        return None if self.forget is None else self.forget(x)


class HeadNorm(nn.Module):
    """RMS norm of each head of x [B, T, H, K], with a scale for each head and channel."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.view(x.shape[-2:])


class TokenShift(nn.Module):
    """Each head of u [B, T, G, K] mixed with its last value, by a weight read from x [B, T, D].

        a_t = sigmoid(x_t w)        out_t = a_t u_{t-1} + (1 - a_t) u_t        w ~ N(0, 0.02)

    State: the last u [B, 1, G K], 0 at the start.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_heads, bias=False)
        nn.init.normal_(self.proj.weight, std=0.02)

    def forward(self, x: Tensor, u: Tensor, last: Tensor, pack: Pack, mode: str) -> tuple[Tensor, Tensor]:
        flat = u.flatten(-2)
        taps = 1 - torch.arange(2, dtype=u.dtype, device=u.device)
        before, last = causal_conv1d(
            flat,
            taps.expand(flat.shape[-1], 2),
            initial_state=last,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
        )
        logits = self.proj(x)[..., None]
        mixed = logits.sigmoid() * before.view_as(u) + (-logits).sigmoid() * u
        return mixed.to(u.dtype), last


class FoxProState(NamedTuple):
    cache: State
    key: Tensor  # [B, 1, G K], the last key before its shift; [B, 0, G K] without shifts
    value: Tensor


@register_mixer("fox_pro", paper="arXiv:2503.02130", op="attention")
class FoxPro(Fox):
    """The Pro block of the Forgetting Transformer: `fox` with shifted keys and values, norms, and an output gate.

        k_t = a_t k'_{t-1} + (1 - a_t) k'_t        k' = x W_k, a_t = sigmoid(x_t w_k) a head; v_t alike, with its own weight
        o_i = sum_{j <= i} softmax_j(K^{-1/2} norm(q_i) . norm(k_j) + log f_{j+1} + ... + log f_i) v_j        per head
        y_i = (norm(o_i) * sigmoid(x_i W_g)) W_o

    The norms are RMS norms of a head with a scale for each head and channel. State: that of `fox`, with the keys as they are
    after shift and norm, and the last k' and v'. Weights: (3 + 2 G / H) D^2 + (H + 2 G) D. A step costs O(D^2 + t D).

    Args:
        dim: width D.
        num_heads: H; by default so many that the head width is the largest even divisor of D up to 64.
        num_kv_heads: G, heads of k and v, each shared by H / G heads of q; H by default.
        head_dim: K, by default D / H.
        window: keys that a query sees, itself among them; all by default.
        forget_gate: "full", of x; "bias_only", constant and learnt; "fixed", constant; None, f = 1.
        decay_time_min: tokens in which the first head falls to 1 / e: at the start of "bias_only", of "fixed" for good.
        decay_time_max: of the last head; those between lie evenly in the logarithm. The defaults are this zoo's.
        kv_shift: mix keys and values with the ones before.
        qk_norm: normalise each head of q and k.
        output_norm: normalise each head of o.
        output_gate: gate the output.
        rope: rotate q and k by their positions.
        rope_base: base of the rotation's frequencies.
        bias: of the projections of q, k, v and y.
        norm_eps: of the norms.
        chunk_size: queries a block in the chunked mode.

    Raises:
        ValueError: an option's value is not as above, such as an odd head width with `rope`.

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
        forget_gate: str | None = "full",
        decay_time_min: float = 2.0,
        decay_time_max: float = 1024.0,
        kv_shift: bool = True,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: bool = True,
        rope: bool = False,
        rope_base: float = 500000.0,
        bias: bool = False,
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
            bias=bias,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
        )
        H, G, K = self.num_heads, self.num_kv_heads, self.head_dim
        self.key_shift = TokenShift(dim, G) if kv_shift else None
        self.value_shift = TokenShift(dim, G) if kv_shift else None
        self.query_norm = HeadNorm(H, K, norm_eps) if qk_norm else None
        self.key_norm = HeadNorm(G, K, norm_eps) if qk_norm else None
        self.norm = HeadNorm(H, K, norm_eps) if output_norm else None
        self.gate_proj = nn.Linear(dim, H * K, bias=False) if output_gate else None

    def init_state(self, batch: int, capacity: int | None = None) -> FoxProState:
        shape = (int(self.key_shift is not None), self.num_kv_heads * self.head_dim)
        dtype = self.out_proj.weight.dtype
        key, value = (self.zeros(batch, *shape, dtype=dtype) for _ in range(2))
        return FoxProState(super().init_state(batch, capacity), key, value)

    def reserve(self, state: FoxProState, room: int) -> FoxProState:
        return state._replace(cache=reserve(state.cache, room, window=self.window))

    def mix(
        self, x: Tensor, state: FoxProState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, Any]:
        return self._mix(x, state, pack, mode)

    def mix_in_place(self, x: Tensor, state: FoxProState, *, shared: Shared) -> tuple[Tensor, Any]:
        y, new = self._mix(x, state, Pack(), "recurrent", donate=True)
        return y, FoxProState(new.cache, state.key.copy_(new.key), state.value.copy_(new.value))

    def _mix(
        self, x: Tensor, state: FoxProState, pack: Pack, mode: str, donate: bool = False
    ) -> tuple[Tensor, FoxProState]:
        q, k, v = self._heads(x)
        key, value = state.key, state.value
        if self.key_shift is not None and self.value_shift is not None:
            k, key = self.key_shift(x, k, key, pack, mode)
            v, value = self.value_shift(x, v, value, pack, mode)
        o, cache = self._attend(x, q, k, v, state.cache, pack, mode, donate)
        if self.norm is not None:
            o = float_norm(self.norm, o)
        y = o.flatten(-2)
        if self.gate_proj is not None:
            y = y * self.gate_proj(x).sigmoid()
        return self.out_proj(y.to(x.dtype)), FoxProState(cache, key, value)


@register_mixer("transformer_pro", paper="arXiv:2503.02130", op="attention")
class TransformerPro(FoxPro):
    """The Pro block without a forget gate, with rotary positions: the baseline that `fox_pro` was published beside.

        o_i = sum_{j <= i} softmax_j(K^{-1/2} rot(norm(q_i)) . rot(norm(k_j))) v_j

    and the rest, options and errors too, as in `fox_pro`. State: that of `attention`, and the last key and value before their
    shift. Weights: (3 + 2 G / H) D^2 + 2 G D. A step costs O(D^2 + t D) at position t.

    Args:
        dim: width D.

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
        kv_shift: bool = True,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: bool = True,
        rope: bool = True,
        rope_base: float = 500000.0,
        bias: bool = False,
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
            kv_shift=kv_shift,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
            rope=rope,
            rope_base=rope_base,
            bias=bias,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
        )
