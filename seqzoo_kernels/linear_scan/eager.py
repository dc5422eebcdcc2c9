"""linear_scan in plain torch: blocks of time side by side.

Time is cut into n blocks of C steps. All blocks step together from a state of 0; the n states they end with are joined in
order, a block's decay being exp of its summed logs; then all blocks step together again from the right state. Products
never run across more than C factors, so rounding does not grow with T, and a decay of 0 forgets exactly.
"""

import math

import torch
from torch import Tensor

from ..checks import state_dtype
from ..packs import locate, take
from .reference import out_dtype, split_decay

Optional = Tensor | None


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
    if reverse:
        out, final = forward(*_flip(log_decay, x, phase, initial_state, cu_seqlens), False, mode, chunk_size)
        return out.flip(1), final if cu_seqlens is None else final.flip(0)
    dtype = _dtype(x, phase)
    g, u = log_decay.to(dtype.to_real()), x.to(dtype)
    h = None if initial_state is None else initial_state.to(dtype)
    if cu_seqlens is not None:
        return _forward_packed(g, u, phase, h, cu_seqlens, mode, chunk_size, out_dtype(x, phase))
    out = torch.empty_like(u, memory_format=torch.contiguous_format)
    h = u.new_zeros(u.shape[0], u.shape[2]) if h is None else h
    length = u.shape[1]
    if mode == "recurrent":
        final = _recurrent(g, u, phase, h, out)
    elif mode == "chunked":
        final = h
        for t in range(0, length, chunk_size):
            part = slice(t, t + chunk_size)
            final = _blocked(_at(g, part), u[:, part], _at(phase, part), final, out[:, part])
    else:
        final = _blocked(g, u, phase, h, out)
    return out.to(out_dtype(x, phase)), final.clone()


def _recurrent(g: Tensor, x: Tensor, phase: Optional, h: Tensor, out: Tensor) -> Tensor:
    decay, residual = split_decay(g, phase)
    length = x.shape[1]
    for x_t, a, r, out_t in zip(
        x.unbind(1), _steps(decay, length), _steps(residual, length), out.unbind(1), strict=True
    ):
        h = torch.addcmul(torch.addcmul(x_t, r, h), a, h, out=out_t)
    return h


def _blocked(g: Tensor, x: Tensor, phase: Optional, carry: Tensor, out: Tensor) -> Tensor:
    """Fill `out` [B, T, D] from the state `carry` [B, D]; return the last state."""
    batch, length, _ = x.shape
    block = _block(length)
    n = length // block
    decay = _decay(g, phase)
    if n > 1:
        whole = slice(0, n * block)
        xs, outs = _split(x[:, whole], n), _split(out[:, whole], n)
        decays = _split(_at(decay, whole), n) if decay.dim() == 3 else [decay] * block
        h = xs[0]
        for a, x_t in zip(decays[1:], xs[1:], strict=True):
            h = torch.addcmul(x_t, a, h)
        totals = _block_decays(_at(g, whole), _at(phase, whole), n, block, batch)
        carries = torch.empty_like(h)
        for i in range(n):
            carries[:, i] = carry
            carry = torch.addcmul(h[:, i], totals[:, i], carry)
        h = carries
        for a, x_t, out_t in zip(decays, xs, outs, strict=True):
            h = torch.addcmul(x_t, a, h, out=out_t)
        carry = h[:, -1]
    done = n * block if n > 1 else 0
    rest = slice(done, None)
    tail = _steps(_at(decay, rest), length - done)
    for a, x_t, out_t in zip(tail, x[:, rest].unbind(1), out[:, rest].unbind(1), strict=True):
        carry = torch.addcmul(x_t, a, carry, out=out_t)
    return carry


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
    """With G_t = dy_t + conj(a_{t+1}) G_{t+1} and K_t = conj(a_t) G_t, what t hands to t - 1:
    dx = G, z = conj(K_t) h_{t-1}, d log_decay = Re z, d phase = -Im z, d h_0 = K_1."""
    if reverse:
        final_grad = grad_final if cu_seqlens is None else grad_final.flip(0)
        flipped = _flip(log_decay, x, phase, initial_state, cu_seqlens)
        dg, dx, dphase, dh, _ = backward(
            grad_out.flip(1), final_grad, out.flip(1), final, *flipped, False, mode, chunk_size
        )
        dg = dg.flip(1) if log_decay.dim() == 3 else dg
        dphase = dphase.flip(1) if dphase is not None and dphase.dim() == 3 else dphase
        return dg, dx.flip(1), dphase, dh if dh is None or cu_seqlens is None else dh.flip(0), None
    dtype = _dtype(x, phase)
    g, h, dy, carry = (
        t.to(d)
        for t, d in ((log_decay, dtype.to_real()), (out, dtype), (grad_out, dtype), (grad_final, dtype))
    )
    if cu_seqlens is None:
        h_0 = torch.zeros_like(carry) if initial_state is None else initial_state.to(dtype)
        dg, dx, dphase, dh = _backward_dense(g, phase, h, h_0, dy, carry)
    else:
        dg, dx, dphase, dh = _backward_packed(g, phase, h, initial_state, dy, carry, cu_seqlens)
    dx = dx if x.is_complex() or not dx.is_complex() else dx.real
    if initial_state is None:
        dh = None
    elif not initial_state.is_complex() and dh.is_complex():
        dh = dh.real
    return (
        dg.to(log_decay.dtype),
        dx.to(x.dtype),
        None if phase is None else dphase.to(phase.dtype),
        None if dh is None else dh.to(initial_state.dtype),
        None,
    )


def _backward_dense(
    g: Tensor, phase: Optional, h: Tensor, h_0: Tensor, dy: Tensor, carry: Tensor
) -> tuple[Tensor, Tensor, Optional, Tensor]:
    batch, length, width = dy.shape
    block = _block(length)
    n = length // block if length // block > 1 else 0
    decay = _decay(g, phase, conjugate=True)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    sinks = _Sinks(g, phase, dy)
    done = n * block
    rest = slice(done, None)
    before = h[:, done - 1] if done else h_0
    states = [before, *h[:, rest].unbind(1)[:-1]] if length > done else []
    carry = _step_back(
        _steps(_at(decay, rest), length - done),
        dy[:, rest].unbind(1),
        dx[:, rest].unbind(1),
        states,
        carry,
        sinks.at(rest),
    )
    if n:
        whole = slice(0, done)
        dys, dxs = _split(dy[:, whole], n), _split(dx[:, whole], n)
        decays = _split(_at(decay, whole), n) if decay.dim() == 3 else [decay] * block
        k = torch.zeros_like(dys[0])
        for a, dy_t in zip(reversed(decays), reversed(dys), strict=True):
            k = torch.mul(a, k.add_(dy_t), out=torch.empty_like(k))
        totals = _block_decays(_at(g, whole), _at(phase, whole), n, block, batch, conjugate=True)
        carries = torch.empty_like(k)
        for i in reversed(range(n)):
            carries[:, i] = carry
            carry = torch.addcmul(k[:, i], totals[:, i], carry)
        hs = _split(h[:, whole], n)
        first = torch.cat([h_0[:, None], hs[-1][:, :-1]], 1)
        carry = _step_back(decays, dys, dxs, [first, *hs[:-1]], carries, sinks.blocks(whole, n))[:, 0]
    dg, dphase = sinks.result()
    return dg, dx, dphase, carry.clone()


def _step_back(decays, dys, dxs, states, k, sinks) -> Tensor:  # type: ignore[no-untyped-def]
    """The reversed recurrence over lists of time slices; `sinks` takes z of each step."""
    for i in reversed(range(len(dys))):
        torch.add(dys[i], k, out=dxs[i])
        k = decays[i] * dxs[i]
        sinks(i, k, states[i])
    return k


class _Sinks:
    """Where d log_decay and d phase go: [B, T, D] step by step, or summed for a constant [D]."""

    def __init__(self, g: Tensor, phase: Optional, dy: Tensor) -> None:
        real = g.dtype
        self.real_sum = dy.new_zeros(dy.shape[2], dtype=real) if g.dim() == 1 else None
        self.dg = torch.empty(dy.shape, dtype=real, device=dy.device) if g.dim() == 3 else None
        self.complex = phase is not None
        self.imag_sum = (
            dy.new_zeros(dy.shape[2], dtype=real) if phase is not None and phase.dim() == 1 else None
        )
        varying = phase is not None and phase.dim() == 3
        self.dphase = torch.empty(dy.shape, dtype=real, device=dy.device) if varying else None

    def at(self, part: slice):  # type: ignore[no-untyped-def]
        dg = None if self.dg is None else self.dg[:, part].unbind(1)
        dphase = None if self.dphase is None else self.dphase[:, part].unbind(1)
        return lambda i, k, h: self._take(k, h, dg and dg[i], dphase and dphase[i], dims=(0,))

    def blocks(self, part: slice, n: int):  # type: ignore[no-untyped-def]
        dg = None if self.dg is None else _split(self.dg[:, part], n)
        dphase = None if self.dphase is None else _split(self.dphase[:, part], n)
        return lambda i, k, h: self._take(k, h, dg and dg[i], dphase and dphase[i], dims=(0, 1))

    def _take(self, k: Tensor, h: Tensor, dg: Optional, dphase: Optional, dims: tuple[int, ...]) -> None:
        if not self.complex:
            if dg is not None:
                torch.mul(k, h, out=dg)
            elif self.real_sum is not None:
                self.real_sum += (k * h).sum(dims)
            return
        z = k.conj() * h
        if dg is not None:
            dg.copy_(z.real)
        if dphase is not None:
            torch.neg(z.imag, out=dphase)
        if self.real_sum is not None or self.imag_sum is not None:
            total = z.sum(dims)
            if self.real_sum is not None:
                self.real_sum += total.real
            if self.imag_sum is not None:
                self.imag_sum -= total.imag

    def result(self) -> tuple[Tensor, Optional]:
        dg = self.real_sum if self.dg is None else self.dg
        assert dg is not None
        return dg, self.imag_sum if self.dphase is None else self.dphase


def _forward_packed(
    g: Tensor,
    x: Tensor,
    phase: Optional,
    h: Optional,
    cu: Tensor,
    mode: str,
    chunk_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A pack is one long row whose decay is 0 where a sequence starts and whose state enters there as input."""
    length, width = x.shape[1:]
    sequences = cu.shape[0] - 1
    tokens = locate(cu, length)
    h = x.new_zeros(sequences, width) if h is None else h
    x = take(x[0], torch.arange(length, device=x.device), tokens.valid)[None]
    if sequences:
        a = _decay(_rows(g, length), None if phase is None else _rows(phase, length))
        start = (tokens.offset == 0) & tokens.valid
        x = x + (take(h, tokens.sequence, start) * a[0].masked_fill(~start[:, None], 0))[None]
    out, _ = forward(_reset(g, tokens, length), x, phase, None, None, False, mode, chunk_size)
    out = out.masked_fill(~tokens.valid[:, None], 0)
    ends = cu.long()[1:] - 1
    final = torch.where((cu[1:] > cu[:-1])[:, None], take(out[0], ends, ends >= 0), h)
    return out.to(dtype), final


def _backward_packed(
    g: Tensor, phase: Optional, h: Tensor, initial_state: Optional, dy: Tensor, grad_final: Tensor, cu: Tensor
) -> tuple[Tensor, Tensor, Optional, Tensor]:
    length, width = dy.shape[1:]
    sequences = cu.shape[0] - 1
    tokens = locate(cu, length)
    h_0 = dy.new_zeros(sequences, width) if initial_state is None else initial_state.to(dy.dtype)
    zero = dy.new_zeros(1, width)
    dy = take(dy[0], torch.arange(length, device=dy.device), tokens.valid)[None]
    start = (tokens.offset == 0) & tokens.valid
    stop = (
        tokens.valid & (tokens.offset + 1 == (cu[1:] - cu[:-1])[tokens.sequence])
        if sequences
        else tokens.valid
    )
    dy = dy + take(grad_final, tokens.sequence, stop)[None] if sequences else dy
    dg, dx, dphase, _ = _backward_dense(
        _reset(g, tokens, length), None if phase is None else _rows(phase, length), h, zero, dy, zero
    )
    # what a start hands to its initial state, and the gates of the starts, from the decay that the reset replaced
    k = _decay(_rows(g, length), None if phase is None else _rows(phase, length), conjugate=True)[0] * dx[0]
    k = k.masked_fill(~start[:, None], 0)
    z = k.conj() * take(h_0, tokens.sequence, start) if sequences else k
    dg, dphase = (
        dg.masked_fill(~tokens.valid[:, None], 0),
        None if dphase is None else dphase.masked_fill(~tokens.valid[:, None], 0),
    )
    dg = dg + (z.real if z.is_complex() else z)
    dphase = None if dphase is None else dphase - z.imag
    first = cu.long()[:-1]
    full = (cu[1:] > cu[:-1])[:, None]
    dh = torch.where(full, take(k, first, first < length), grad_final)
    dg = dg.sum((0, 1)) if g.dim() == 1 else dg
    dphase = dphase.sum((0, 1)) if phase is not None and phase.dim() == 1 else dphase
    return dg, dx, dphase, dh


def _reset(g: Tensor, tokens, length: int) -> Tensor:  # type: ignore[no-untyped-def]
    """log_decay [1, T, D] with -inf where a sequence starts and where none is."""
    cut = (tokens.offset == 0) | ~tokens.valid
    return _rows(g, length).masked_fill(cut[:, None], -math.inf)


def _rows(value: Tensor, length: int) -> Tensor:
    return value.expand(1, length, value.shape[-1])


def _flip(log_decay: Tensor, x: Tensor, phase: Optional, state: Optional, cu: Optional):  # type: ignore[no-untyped-def]
    """The arguments with time turned round."""
    g = log_decay.flip(1) if log_decay.dim() == 3 else log_decay
    p = phase.flip(1) if phase is not None and phase.dim() == 3 else phase
    s = state if state is None or cu is None else state.flip(0)
    return g, x.flip(1), p, s, None if cu is None else x.shape[1] - cu.flip(0)


def _dtype(x: Tensor, phase: Optional) -> torch.dtype:
    dtype = state_dtype(x.dtype)
    return dtype if phase is None else dtype.to_complex()


def _decay(g: Tensor, phase: Optional, *, conjugate: bool = False) -> Tensor:
    """e^{g + i phase}, or its conjugate."""
    modulus = g.exp()
    if phase is None:
        return modulus
    angle = phase.to(g.dtype)
    shape = torch.broadcast_shapes(g.shape, phase.shape)
    decay = torch.empty(shape, dtype=g.dtype.to_complex(), device=g.device)
    parts = torch.view_as_real(decay)
    torch.mul(modulus, angle.cos(), out=parts[..., 0])
    torch.mul(modulus, angle.sin() * (-1 if conjugate else 1), out=parts[..., 1])
    return decay


def _block_decays(
    g: Tensor, phase: Optional, n: int, block: int, batch: int, *, conjugate: bool = False
) -> Tensor:
    """The decay of each whole block, exp of its summed logs [B, n, D]."""

    def total(value: Tensor) -> Tensor:
        if value.dim() == 1:
            return (value * block).expand(batch, n, -1)
        return value.unflatten(1, (n, block)).sum(2)

    angle = None if phase is None else total(phase.to(g.dtype))
    return _decay(total(g), angle, conjugate=conjugate).expand(batch, n, g.shape[-1])


def _block(length: int) -> int:
    """Steps a block: 2C steps of all blocks and T / C joins cost least near sqrt(T / 2); sqrt(2T) keeps slices large."""
    return max(1, round(math.sqrt(2 * length)))


def _at(value, part: slice):  # type: ignore[no-untyped-def]
    """Time slice of a [B, T, D]; a constant [D] or None stays."""
    return value if value is None or value.dim() == 1 else value[:, part]


def _split(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """[B, n * C, D] as C slices [B, n, D]."""
    return x.unflatten(1, (n, x.shape[1] // n)).unbind(2)


def _steps(value: Tensor, length: int):  # type: ignore[no-untyped-def]
    return [value] * length if value.dim() == 1 else value.unbind(1)
