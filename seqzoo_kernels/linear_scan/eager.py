"""linear_scan in plain torch: directions, packs and dtypes; the scan itself is in blocks.py.

A pack is one long row whose decay is 0 where a sequence starts and whose initial state enters there as input.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import state_dtype
from ..packs import Tokens, locate, take
from . import blocks
from .reference import out_dtype

Optional = Tensor | None


class Problem(NamedTuple):
    """The tensor arguments of the op."""

    log_decay: Tensor
    x: Tensor
    phase: Optional
    initial_state: Optional
    cu_seqlens: Optional

    def flip(self) -> "Problem":
        """With time turned round; a pack's sequences then come in the opposite order."""
        packed = self.cu_seqlens is not None
        return Problem(
            _flip_time(self.log_decay),
            self.x.flip(1),
            None if self.phase is None else _flip_time(self.phase),
            self.initial_state.flip(0) if packed and self.initial_state is not None else self.initial_state,
            None if self.cu_seqlens is None else self.x.shape[1] - self.cu_seqlens.flip(0),
        )


def forward(
    log_decay: Tensor,
    x: Tensor,
    phase: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    reverse: bool,
    mode: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    p = Problem(log_decay, x, phase, initial_state, cu_seqlens)
    if reverse:
        out, final = forward(*p.flip(), False, mode, chunk_size)
        return out.flip(1), final if cu_seqlens is None else final.flip(0)
    dtype = _dtype(x, phase)
    g, u = log_decay.to(dtype.to_real()), x.to(dtype)
    if cu_seqlens is not None:
        h, final = _forward_packed(p, g, u, cu_seqlens, mode, chunk_size)
    else:
        h_0 = u.new_zeros(u.shape[0], u.shape[2]) if initial_state is None else initial_state.to(dtype)
        h, final = blocks.scan(g, u, phase, h_0, mode, chunk_size)
    return h.to(out_dtype(x, phase)), final.clone()


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    out: Tensor,
    final: Tensor,
    log_decay: Tensor,
    x: Tensor,
    phase: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    reverse: bool,
    mode: str,
    chunk_size: int,
) -> tuple[Optional, ...]:
    p = Problem(log_decay, x, phase, initial_state, cu_seqlens)
    if reverse:
        last = grad_final if cu_seqlens is None else grad_final.flip(0)
        dg, dx, dphase, dh, _ = backward(
            grad_out.flip(1), last, out.flip(1), final, *p.flip(), False, mode, chunk_size
        )
        assert dg is not None and dx is not None
        return Problem(dg, dx, dphase, dh, cu_seqlens).flip()._replace(cu_seqlens=None)
    dtype = _dtype(x, phase)
    g, h, dy, d_final = log_decay.to(dtype.to_real()), out.to(dtype), grad_out.to(dtype), grad_final.to(dtype)
    if cu_seqlens is None:
        h_0 = torch.zeros_like(d_final) if initial_state is None else initial_state.to(dtype)
        dg, dx, dphase, dh = blocks.scan_backward(g, phase, h, h_0, dy, d_final)
    else:
        dg, dx, dphase, dh = _backward_packed(p, g, h, dy, d_final, cu_seqlens)
    return (
        dg.to(log_decay.dtype),
        _as(dx, x),
        None if phase is None or dphase is None else dphase.to(phase.dtype),
        None if initial_state is None else _as(dh, initial_state),
        None,
    )


def _forward_packed(
    p: Problem, g: Tensor, x: Tensor, cu: Tensor, mode: str, chunk_size: int
) -> tuple[Tensor, Tensor]:
    length, width = x.shape[1:]
    tokens = locate(cu, length)
    h_0 = x.new_zeros(cu.shape[0] - 1, width) if p.initial_state is None else p.initial_state.to(x.dtype)
    x = _only(x, tokens)
    start = (tokens.offset == 0) & tokens.valid
    decay = _row(blocks.decay(g, p.phase).value, length)
    x = x + take(h_0, tokens.sequence, start) * decay.masked_fill(~start[:, None], 0)
    phase = p.phase if p.phase is None or p.phase.dim() == 1 else _only(p.phase, tokens)
    h, _ = blocks.scan(_reset(g, tokens), x, phase, torch.zeros_like(x[:, :0].sum(1)), mode, chunk_size)
    h = h.masked_fill(~tokens.valid[:, None], 0)
    ends = cu.long()[1:] - 1
    return h, torch.where((cu[1:] > cu[:-1])[:, None], take(h[0], ends, ends >= 0), h_0)


def _backward_packed(
    p: Problem, g: Tensor, h: Tensor, dy: Tensor, d_final: Tensor, cu: Tensor
) -> tuple[Tensor, Tensor, Optional, Tensor]:
    length, width = dy.shape[1:]
    tokens = locate(cu, length)
    first, ends, full = cu.long()[:-1], cu.long()[1:] - 1, (cu[1:] > cu[:-1])[:, None]
    h_0 = dy.new_zeros(cu.shape[0] - 1, width) if p.initial_state is None else p.initial_state.to(dy.dtype)
    start = (tokens.offset == 0) & tokens.valid
    stop = tokens.valid & (
        torch.arange(length, device=cu.device) == take(ends, tokens.sequence, tokens.valid)
    )
    dy = _only(dy, tokens) + take(d_final, tokens.sequence, stop)
    phase = None if p.phase is None else _only(_row(p.phase, length), tokens)
    zero = dy.new_zeros(1, width)
    dg, dx, dphase, _ = blocks.scan_backward(_reset(g, tokens), phase, h, zero, dy, zero)
    # what the first token of a sequence hands to its initial state, by the decay that the reset replaced
    k = _row(blocks.decay(g, p.phase, conjugate=True).value, length) * dx
    k = k.masked_fill(~start[:, None], 0)
    z = torch.conj_physical(k) * take(h_0, tokens.sequence, start)
    dg = (dg + (z.real if z.is_complex() else z)).masked_fill(~tokens.valid[:, None], 0)
    if dphase is not None and p.phase is not None:
        dphase = (dphase - z.imag).masked_fill(~tokens.valid[:, None], 0)
        dphase = dphase.sum((0, 1)) if p.phase.dim() == 1 else dphase
    dh = torch.where(full, take(k[0], first, first < length), d_final)
    return dg.sum((0, 1)) if g.dim() == 1 else dg, dx, dphase, dh


def _reset(g: Tensor, tokens: Tokens) -> Tensor:
    """log_decay [1, T, D] with -inf where a sequence starts and where none is."""
    cut = (tokens.offset == 0) | ~tokens.valid
    return _row(g, cut.shape[0]).masked_fill(cut[:, None], -math.inf)


def _only(x: Tensor, tokens: Tokens) -> Tensor:
    """x [1, T, D] with zeros, whatever was there, at tokens of no sequence."""
    return take(x[0], torch.arange(x.shape[1], device=x.device), tokens.valid)[None]


def _row(value: Tensor, length: int) -> Tensor:
    return value.expand(1, length, value.shape[-1])


def _flip_time(value: Tensor) -> Tensor:
    return value.flip(1) if value.dim() == 3 else value


def _as(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of a real input is the real part."""
    return (grad.real if grad.is_complex() and not like.is_complex() else grad).to(like.dtype)


def _dtype(x: Tensor, phase: Optional) -> torch.dtype:
    dtype = state_dtype(x.dtype)
    return dtype if phase is None else dtype.to_complex()
