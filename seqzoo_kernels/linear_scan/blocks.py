"""The dense scan in plain torch: blocks of time side by side.

Time is cut into n blocks of C steps. All blocks step together from a state of 0; the n states they end with are joined in
order, a block's decay being exp of its summed logs; then all blocks step together again from the right state. Products
never run across more than C factors, so rounding does not grow with T, and a decay of 0 forgets exactly. Backward is the
same in the other direction. What is left of T behind the blocks is stepped through on its own.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..stepping import Decay, split_decay

Optional = Tensor | None
Steps = Sequence[Tensor]


def scan(
    g: Tensor, x: Tensor, phase: Optional, h: Tensor, mode: str, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """States [B, T, D] and the last one, from `h` [B, D]; g and phase are [B, T, D] or [D]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if mode == "recurrent":
        return out, _recurrent(g, x, phase, h, out)
    if mode == "parallel":
        return out, _blocked(g, x, phase, h, out)
    for t in range(0, x.shape[1], chunk_size):
        part = slice(t, t + chunk_size)
        h = _blocked(_at(g, part), x[:, part], None if phase is None else _at(phase, part), h, out[:, part])
    return out, h


def _recurrent(g: Tensor, x: Tensor, phase: Optional, h: Tensor, out: Tensor) -> Tensor:
    decays = _each(Decay(*split_decay(g, phase)), lambda value: _steps(value, x.shape[1]))
    for x_t, a, out_t in zip(x.unbind(1), decays, out.unbind(1), strict=True):
        h = a.step(x_t, h, out_t)
    return h


def _blocked(g: Tensor, x: Tensor, phase: Optional, carry: Tensor, out: Tensor) -> Tensor:
    """Fill `out` [B, T, D] from the state `carry` [B, D]; return the last state."""
    layout = _Layout(x)
    decays = decay(g, phase)
    if layout.n:
        xs, outs, steps = layout.split(x), layout.split(out), _each(decays, layout.split)
        h = xs[0]
        for a, x_t in zip(steps[1:], xs[1:], strict=True):
            h = a.step(x_t, h)
        h = _join(layout.total_decay(g, phase), h.unbind(1), carry)
        for a, x_t, out_t in zip(steps, xs, outs, strict=True):
            h = a.step(x_t, h, out_t)
        carry = h[:, -1]
    for a, x_t, out_t in zip(_each(decays, layout.rest), layout.rest(x), layout.rest(out), strict=True):
        carry = a.step(x_t, carry, out_t)
    return carry


def _join(totals: Sequence[Decay], ends: Steps, carry: Tensor) -> Tensor:
    """The state [B, n, D] before each of n blocks, from the one before the first and what each adds to it."""
    before = carry.new_empty(carry.shape[0], len(ends), carry.shape[1])
    slots = before.unbind(1)
    slots[0].copy_(carry)
    for total, end, here, there in zip(totals, ends, slots, slots[1:], strict=False):
        total.step(end, here, there)
    return before


def scan_backward(
    g: Tensor, phase: Optional, h: Tensor, h_0: Tensor, dy: Tensor, carry: Tensor
) -> tuple[Tensor, Tensor, Optional, Tensor]:
    """Gradients of g, x, phase and h_0, from those of the states and of the last one (`carry`).

    With G_t = dy_t + conj(a_{t+1}) G_{t+1} and K_t = conj(a_t) G_t, what t hands to t - 1: dx = G, and of
    z_t = conj(K_t) h_{t-1} the real part is d g and minus the imaginary part d phase; d h_0 = K_1.
    """
    layout = _Layout(dy)
    decays = decay(g, phase, conjugate=True)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    sink = _Sink(g, phase, dy, decays.value)
    rest = layout.rest(h)
    before = [h[:, layout.done - 1] if layout.done else h_0, *rest[:-1]]
    carry = _step_back(
        _each(decays, layout.rest),
        layout.rest(dy),
        layout.rest(dx),
        before,
        carry,
        sink.through(layout.rest, (0,)),
    )
    if layout.n:
        dys, dxs, hs = (layout.split(value) for value in (dy, dx, h))
        steps = _each(decays, layout.split)
        k = torch.zeros_like(dys[0])
        for a, dy_t in zip(reversed(steps), reversed(dys), strict=True):
            k = a.times(k.add_(dy_t), out=k)
        totals = layout.total_decay(g, None if phase is None else -phase)
        carries = _join(totals[::-1], k.unbind(1)[::-1], carry).flip(1)
        first = torch.cat([h_0[:, None], hs[-1][:, :-1]], 1)
        carry = _step_back(steps, dys, dxs, [first, *hs[:-1]], carries, sink.through(layout.split, (0, 1)))[
            :, 0
        ]
    dg, dphase = sink.result()
    return dg, dx, dphase, carry.clone()


def _step_back(
    decays: Sequence[Decay],
    dys: Steps,
    dxs: Steps,
    before: Steps,
    k: Tensor,
    sink: Callable[[int, Tensor, Tensor], None],
) -> Tensor:
    for i in reversed(range(len(dys))):
        torch.add(dys[i], k, out=dxs[i])
        k = decays[i].times(dxs[i], out=k if len(dys) > i + 1 else None)
        sink(i, k, before[i])
    return k


class _Layout:
    """n blocks of C steps and a rest; n is 0 where one block would do."""

    def __init__(self, x: Tensor) -> None:
        self.batch, self.length, self.width = x.shape
        # a rounded decay drifts from step to step, so a block is short; joins do not drift
        longest = 16 if x.is_complex() else 32
        self.block = max(1, min(longest, round(math.sqrt(2 * self.length))))
        n = self.length // self.block
        self.n = n if n > 1 else 0
        self.done = self.n * self.block

    def split(self, value: Tensor) -> Steps:
        """C slices [B, n, D] of [B, T, D]; a constant [D] is the same in each."""
        if value.dim() == 1:
            return [value] * self.block
        return value[:, : self.done].unflatten(1, (self.n, self.block)).unbind(2)

    def rest(self, value: Tensor) -> Steps:
        """The slices [B, D] behind the blocks."""
        return _steps(_at(value, slice(self.done, None)), self.length - self.done)

    def total_decay(self, g: Tensor, phase: Optional) -> Sequence[Decay]:
        """The decay of each of the n whole blocks, exp of its summed logs."""

        def total(value: Tensor) -> Tensor:
            if value.dim() == 1:
                return value.double() * self.block
            return value[:, : self.done].unflatten(1, (self.n, self.block)).sum(2)

        angle = None if phase is None else total(phase.double())  # many turns: float32 would lose the place
        total_decay = Decay(*split_decay(total(g), angle, dtype=g.dtype))
        return _each(total_decay, lambda value: _steps(value, self.n))


class _Sink:
    """Where d g and d phase go: [B, T, D] step by step, or a sum for a constant [D].

    A step needs its decay no more when its d g is known: where the two have one dtype, d g is written over it.
    """

    def __init__(self, g: Tensor, phase: Optional, dy: Tensor, decay: Tensor) -> None:
        def place(value: Tensor) -> Tensor:
            if value.dim() == 3:
                return torch.empty(dy.shape, dtype=g.dtype, device=dy.device)
            return torch.zeros(dy.shape[2], dtype=torch.float64, device=dy.device)

        self.dtype = g.dtype
        self.dg = decay if phase is None and g.dim() == 3 else place(g)
        self.dphase = None if phase is None else place(phase)

    def through(
        self, view: Callable[[Tensor], Steps], dims: tuple[int, ...]
    ) -> Callable[[int, Tensor, Tensor], None]:
        """A function that puts the z of step i where `view` has it; `dims` are those a constant sums over."""
        dgs = view(self.dg)
        dphases = None if self.dphase is None else view(self.dphase)

        def put(target: Tensor, value: Tensor) -> None:
            if target.dim() == 1:
                target += value.sum(dims)
            else:
                target.copy_(value)

        def sink(i: int, k: Tensor, h: Tensor) -> None:
            if dphases is None:
                if dgs[i].dim() == 1:
                    put(dgs[i], k * h)
                else:
                    torch.mul(k, h, out=dgs[i])
                return
            z = torch.conj_physical(k) * h  # a lazy conjugate would be lost under a dispatch mode
            put(dgs[i], z.real)
            put(dphases[i], -z.imag)

        return sink

    def result(self) -> tuple[Tensor, Optional]:
        dphase = None if self.dphase is None else self.dphase.to(self.dtype)
        return self.dg.to(self.dtype), dphase


def decay(g: Tensor, phase: Optional, *, conjugate: bool = False) -> Decay:
    """e^{g + i phase}, or its conjugate; with what rounding lost where it is the same at every step."""
    phase = -phase if conjugate and phase is not None else phase
    if g.dim() == 1 and (phase is None or phase.dim() == 1):
        return Decay(*split_decay(g, phase))
    modulus = g.exp()
    if phase is None:
        return Decay(modulus)
    turn, lost = split_decay(torch.zeros_like(phase), phase, dtype=g.dtype)
    result = torch.empty(
        torch.broadcast_shapes(g.shape, phase.shape), dtype=g.dtype.to_complex(), device=g.device
    )
    parts = torch.view_as_real(result)
    for part, of_turn, of_lost in ((0, turn.real, lost.real), (1, turn.imag, lost.imag)):
        torch.mul(modulus, of_lost, out=parts[..., part]).addcmul_(modulus, of_turn)
    return Decay(result)


def _each(decay: Decay, steps: Callable[[Tensor], Steps]) -> Sequence[Decay]:
    """A decay for each of the slices that `steps` cuts."""
    values = steps(decay.value)
    lost: Sequence[Optional] = [None] * len(values) if decay.lost is None else steps(decay.lost)
    return [Decay(*pair) for pair in zip(values, lost, strict=True)]


def _at(value: Tensor, part: slice) -> Tensor:
    """A slice of time of [B, T, D]; a constant [D] stays."""
    return value if value.dim() == 1 else value[:, part]


def _steps(value: Tensor, length: int) -> Steps:
    return [value] * length if value.dim() == 1 else value.unbind(1)
