"""causal_conv1d in plain torch: one shifted product a tap.

A pack reads its shifted tokens by index, from the sequence's own state where the shift leaves the sequence. The chunked and
recurrent modes walk through time with the last inputs in hand; the arithmetic of a token is the same in all of them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import state_dtype
from ..packs import locate, take

Optional = Tensor | None


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(x.dtype)
    lagged = _Lagged(x, initial_state, cu_seqlens, weight.shape[1])
    parts = [
        _convolve(lagged, slice(t, t + chunk_size), weight, bias, dtype)
        for t in range(0, max(x.shape[1], 1), chunk_size)
    ]
    y = torch.cat(parts, 1)
    y = F.silu(y) if silu else y
    return lagged.clear(y).to(x.dtype), lagged.final()


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    out: Tensor,
    final: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    silu: bool,
    chunk_size: int,
) -> tuple[Optional, ...]:
    dtype = state_dtype(x.dtype)
    lagged = _Lagged(x, initial_state, cu_seqlens, weight.shape[1])
    dy = lagged.clear(grad_out.to(dtype))
    if silu:
        y = _convolve(lagged, slice(None), weight, bias, dtype)
        gate = y.sigmoid()
        dy = dy * gate * (1 + y * (1 - gate))
    taps = weight.shape[1]
    w = weight.to(dtype)
    dw = torch.stack([(dy * lagged(taps - 1 - i, slice(None)).to(dtype)).sum((0, 1)) for i in range(taps)], 1)
    dx, d_initial = lagged.spread([dy * w[:, taps - 1 - lag] for lag in range(taps)], grad_final.to(dtype))
    return (
        dx.to(x.dtype),
        dw.to(weight.dtype),
        None if bias is None else dy.sum((0, 1)).to(bias.dtype),
        None if initial_state is None else d_initial.to(initial_state.dtype),
        None,
    )


def _convolve(lagged: "_Lagged", part: slice, weight: Tensor, bias: Optional, dtype: torch.dtype) -> Tensor:
    taps = weight.shape[1]
    w = weight.to(dtype)
    y = lagged(0, part).to(dtype) * w[:, -1]
    for lag in range(1, taps):
        y.addcmul_(lagged(lag, part).to(dtype), w[:, taps - 1 - lag])
    return y if bias is None else y.add_(bias.to(dtype))


class _Lagged:
    """The inputs `lag` tokens back, [B, T, D]; a pack's lie in one line of all tokens followed by all states."""

    def __init__(self, x: Tensor, initial_state: Optional, cu_seqlens: Optional, taps: int) -> None:
        self.tail = taps - 1
        self.length = x.shape[1]
        self.cu = cu_seqlens
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = x.new_zeros(rows, self.tail, x.shape[2]) if initial_state is None else initial_state
        self.state_dtype = state.dtype
        dtype = torch.promote_types(state.dtype, x.dtype)
        if cu_seqlens is None:
            self.line = torch.cat([state.to(dtype), x.to(dtype)], 1)
            return
        self.tokens = locate(cu_seqlens, self.length)
        self.line = torch.cat([x[0].to(dtype), state.flatten(0, 1).to(dtype)])
        t = torch.arange(self.length, device=x.device)
        lag = torch.arange(self.tail + 1, device=x.device)[:, None]
        place = self.tokens.offset - lag  # < 0: in the state
        in_state = self.length + (self.tokens.sequence + 1) * self.tail + place
        self.index = torch.where(place >= 0, t - lag, in_state)
        self.valid = self.tokens.valid.expand_as(self.index)

    def __call__(self, lag: int, part: slice) -> Tensor:
        if self.cu is None:
            return self.line[:, self.tail - lag : self.tail - lag + self.length][:, part]
        return take(self.line, self.index[lag, part], self.valid[lag, part])[None]

    def clear(self, y: Tensor) -> Tensor:
        return y if self.cu is None else y.masked_fill(~self.tokens.valid[:, None], 0)

    def _ends(self) -> Tensor:
        """[N, W - 1]: where in the line the last inputs of each sequence are."""
        assert self.cu is not None
        cu = self.cu.long()
        place = (cu[1:] - cu[:-1])[:, None] + torch.arange(-self.tail, 0, device=cu.device)
        sequence = torch.arange(cu.shape[0] - 1, device=cu.device)[:, None]
        return torch.where(
            place >= 0, cu[:-1, None] + place, self.length + (sequence + 1) * self.tail + place
        )

    def final(self) -> Tensor:
        last = self.line[:, self.length :] if self.cu is None else self.line[self._ends()]
        return last.to(self.state_dtype).clone()

    def spread(self, grads: list[Tensor], grad_final: Tensor) -> tuple[Tensor, Tensor]:
        """Transpose of the reads: gradients of each lag and of the final state, back to x and the initial state."""
        line = grad_final.new_zeros(self.line.shape)
        if self.cu is None:
            line[:, self.length :] += grad_final
            for lag, grad in enumerate(grads):
                line[:, self.tail - lag : self.tail - lag + self.length] += grad
            return line[:, self.tail :], line[:, : self.tail].clone()
        line.index_add_(0, self._ends().flatten(), grad_final.flatten(0, 1))
        for lag, grad in enumerate(grads):
            grad = grad[0].masked_fill(~self.tokens.valid[:, None], 0)
            line.index_add_(0, self.index[lag].clamp(0, max(line.shape[0] - 1, 0)), grad)
        states = line[self.length :].unflatten(0, (grad_final.shape[0], self.tail))
        return line[None, : self.length], states.clone()
