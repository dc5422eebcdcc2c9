"""Right mixers, small ones, in which `planted` plants its faults."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import seqzoo
from seqzoo.layers import ShortConv
from seqzoo.mixers.attention import Attention
from seqzoo_kernels import linear_scan
from seqzoo_kernels.packs import locate


class EMAState(NamedTuple):
    h: Tensor


class EMA(seqzoo.TokenMixer):
    """A right mixer, h_t = a h_{t-1} + (1 - a) x_t, to plant faults in."""

    modes = ("parallel", "chunked", "recurrent")

    def __init__(self, dim: int, *, half_life: float = 8.0) -> None:
        super().__init__(dim)
        self.log_rate = torch.nn.Parameter(torch.log(torch.linspace(0.1, 1.0, dim) / half_life))
        self.out_proj = torch.nn.Linear(dim, dim, bias=False)

    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        h, final = self.scan(x, state.h, pack, mode)
        return self.out_proj(h.to(x.dtype)), EMAState(final)

    def scan(self, x, h, pack, mode):
        log_decay = -self.log_rate.to(h.dtype).exp()
        x = -torch.expm1(log_decay) * x
        return linear_scan(log_decay, x, initial_state=h, cu_seqlens=pack.cu_seqlens, mode=mode)


class Weightless(seqzoo.TokenMixer):
    """h_t = h_{t-1} / 2 + x_t, with nothing to learn."""

    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        log_decay = torch.full((self.dim,), -math.log(2), dtype=state.h.dtype, device=x.device)
        h, final = linear_scan(
            log_decay,
            x,
            initial_state=state.h,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
        )
        return h, EMAState(final)


class Gated(EMA):
    """h_t = f_t h_{t-1} + x_t with a gate that closes for good: log f_t is -inf below -20."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gate = torch.nn.Linear(dim, dim)

    def scan(self, x, h, pack, mode):
        z = self.gate(x).to(h.dtype)
        log_decay = torch.nn.functional.logsigmoid(z).masked_fill(z < -20, -torch.inf)
        return linear_scan(log_decay, x.to(h.dtype), initial_state=h, cu_seqlens=pack.cu_seqlens, mode=mode)


class Bounded(EMA):
    """A decay that is at least what the stack hands down."""

    reads = {"lower_bound": "channel"}

    def mix(self, x, state, *, pack, mode, shared):
        bound = shared.get("lower_bound", 0.0)
        decay = bound + (1 - bound) * torch.sigmoid(self.log_rate.to(state.h.dtype))
        h, final = linear_scan(
            decay.log(),
            x.to(state.h.dtype),
            initial_state=state.h,
            cu_seqlens=pack.cu_seqlens,
            mode=mode,
        )
        return self.out_proj(h.to(x.dtype)), EMAState(final)


class WavesState(NamedTuple):
    h: Tensor
    length: Tensor  # [B] tokens so far


class Waves(EMA):
    """A moving average of tokens that are weighted by their positions."""

    def init_state(self, batch, capacity=None):
        return WavesState(self.zeros(batch, self.dim), self.zeros(batch, dtype=torch.int64))

    def mix(self, x, state, *, pack, mode, shared):
        if pack.cu_seqlens is None:
            start, place = state.length[:, None], torch.arange(x.shape[1], device=x.device)
            added = x.shape[1]
        elif len(state.length):
            tokens = locate(pack.cu_seqlens, x.shape[1])
            start, place = state.length[tokens.sequence], tokens.offset
            added = pack.cu_seqlens.diff()
        else:
            return x, state
        wave = torch.cos(0.3 * (start + place)).to(x.dtype)
        h, final = self.scan(x * wave[..., None], state.h, pack, mode)
        return self.out_proj(h.to(x.dtype)), WavesState(final, state.length + added)


class ConvState(NamedTuple):
    tail: Tensor


class Conv(seqzoo.TokenMixer):
    """A short convolution."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.conv = ShortConv(dim, 4)

    def init_state(self, batch, capacity=None):
        return ConvState(self.zeros(batch, 3, self.dim, dtype=self.conv.weight.dtype))

    def mix(self, x, state, *, pack, mode, shared):
        y, tail = self.conv(x, state.tail, pack, mode)
        return y, ConvState(tail)


class Windowed(Attention):
    """Attention with a window."""

    registered_name = None

    def __init__(self, dim: int) -> None:
        super().__init__(dim, num_heads=2, window=4)


class Growing(Attention):
    """Attention whose cache grows."""

    registered_name = None

    def __init__(self, dim: int) -> None:
        super().__init__(dim, num_heads=2)
