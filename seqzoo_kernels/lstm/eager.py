"""lstm in plain torch: a product and a few pointwise passes a step, in buffers that are laid out once.

Forward leaves the gates in the place of the inputs. Backward knows from them, for all tokens at once, by which factors a step
multiplies the gradients of y and c, so that a step back is one product and four pointwise passes:

    d c_t    += K_y d y_t                      K_y = o tanh'(c) + p_o K_o        K_o = tanh(c) o (1 - o)
    d (i, f, z, o) = K_i dc, K_f dc, K_z dc, K_o dy                              K_i = z i (1 - i) and so on
    d c_{t-1} = (f + p_i K_i + p_f K_f) dc     d y_{t-1} += d (i, f, z, o) weight

What walks over the steps, there and back, may be another backend's: triton.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import Rows
from .cells import CELLS, Cell

Optional = Tensor | None


def forward(
    x: Tensor,
    weight: Tensor,
    peephole: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    variant: str,
    max_seqlen: int | None,
    chunk_size: int,
    *,
    walk: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cell = CELLS[variant]
    n = weight.shape[0] // cell.blocks
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    gates = rows.split(x).clone(memory_format=torch.contiguous_format)  # [L, N, G n]
    length, batch, _ = gates.shape
    seen = x.new_empty(length + 1, batch, cell.seen * n)
    c = x.new_empty(length + 1, batch, n)
    if initial_state is None:
        seen[0], c[0] = 0, 0
    else:
        seen[0], c[0] = initial_state.split([cell.seen * n, n], -1)
    for t in range(0, length, chunk_size):
        steps = slice(t, t + chunk_size)
        states = slice(t, t + chunk_size + 1)
        (walk or _walk)(cell, gates[steps], seen[states], c[states], weight.T, peephole)
    final = torch.cat([rows.last(seen), rows.last(c)], -1)
    if cu_seqlens is not None:
        gates, kept = (rows.join(part).transpose(0, 1) for part in (gates, c[1:]))
        return rows.join(seen[1:, :, :n]), final, gates, kept
    return rows.join(seen[1:, :, :n]), final, gates, c[1:].clone()


def _walk(cell: Cell, gates: Tensor, seen: Tensor, c: Tensor, weight: Tensor, peephole: Optional) -> None:
    """All steps, in place: pre-activations become gates, and states are filled from the first."""
    length, batch, _ = gates.shape
    n, front = c.shape[-1], cell.front
    blocks = gates.unflatten(-1, (cell.blocks, n))
    a, ahead, z = gates.unbind(), blocks[:, :, :front].unbind(), blocks[:, :, front].unbind()
    i, f, o = (_block(cell, blocks, name, length) for name in "ifo")
    s, ys, cs = seen.unbind(), seen[..., :n].unbind(), c.unbind()
    old = c[:, :, None].unbind()
    fed = seen[..., n:].unbind()
    p_ahead = None if peephole is None else peephole[:front]
    p_o = None if peephole is None else peephole[-1]
    h = c.new_empty(batch, n)
    for t in range(length):
        a[t].addmm_(s[t], weight)
        if p_ahead is not None:
            ahead[t].addcmul_(old[t], p_ahead)
        ahead[t].sigmoid_()
        if cell.input_tanh:
            z[t].tanh_()
        if cell.coupled:
            torch.lerp(cs[t], z[t], i[t], out=cs[t + 1])
        else:
            if i:
                torch.mul(i[t], z[t], out=cs[t + 1])
            else:
                cs[t + 1].copy_(z[t])
            if f:
                cs[t + 1].addcmul_(f[t], cs[t])
            else:
                cs[t + 1].add_(cs[t])
        squashed = torch.tanh(cs[t + 1], out=h) if cell.output_tanh else cs[t + 1]
        if o:
            if p_o is not None:
                o[t].addcmul_(cs[t + 1], p_o)
            torch.mul(o[t].sigmoid_(), squashed, out=ys[t + 1])
        else:
            ys[t + 1].copy_(squashed)
        if cell.feedback:
            fed[t + 1][:, : 2 * n].copy_(a[t][:, : 2 * n])
            fed[t + 1][:, 2 * n :].copy_(o[t])


def _block(cell: Cell, blocks: Tensor, name: str, length: int) -> tuple[Tensor, ...]:
    """A gate's view for each step; empty if the cell has no such gate."""
    place = cell.place(name)
    return () if place is None else blocks[:, :, place].unbind()


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    _grad_gates: Tensor,
    _grad_c: Tensor,
    out: Tensor,
    final: Tensor,
    gates: Tensor,
    c: Tensor,
    x: Tensor,
    weight: Tensor,
    peephole: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    variant: str,
    max_seqlen: int | None,
    chunk_size: int,
    *,
    walk_back: Callable[..., None] | None = None,
) -> tuple[Optional, ...]:
    cell = CELLS[variant]
    n, front = c.shape[-1], cell.front
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    if cu_seqlens is not None:
        gates, c = (rows.split(part.transpose(0, 1)) for part in (gates, c))
    blocks = gates.unflatten(-1, (cell.blocks, n))
    start = torch.zeros_like(final) if initial_state is None else initial_state
    seen = torch.cat([start[None, :, :-n], _seen(cell, rows.split(out), blocks)])
    c = torch.cat([start[None, :, -n:], c])

    d_seen, d_c = torch.zeros_like(seen), torch.zeros_like(c)
    d_seen[1:, :, :n] = rows.split(grad_out)
    rows.add_last(d_seen, grad_final[:, :-n])
    rows.add_last(d_c, grad_final[:, -n:])
    d = torch.empty_like(gates, memory_format=torch.contiguous_format)
    (walk_back or _walk_back)(cell, d, d_seen, d_c, gates, c, weight, peephole)

    d_blocks = d.unflatten(-1, (cell.blocks, n))
    d_peephole = None
    if peephole is not None:
        d_peephole = (d_blocks[:, :, :front] * c[:-1, :, None]).sum((0, 1))
        if "o" in cell.gates:
            d_peephole = torch.cat([d_peephole, (d_blocks[:, :, -1] * c[1:]).sum((0, 1))[None]])
    d_weight = d.flatten(0, 1).T @ seen[:-1].flatten(0, 1)
    d_start = None if initial_state is None else torch.cat([d_seen[0], d_c[0]], -1)
    return rows.join(d), d_weight, d_peephole, d_start, None


class _Factors(NamedTuple):
    """What a step back multiplies by, [L, N, ...]."""

    ahead: Tensor  # d c -> d of the gates that see the old cell, and of z: [L, N, front + 1, n]
    carry: Tensor  # d c_t -> d c_{t-1}
    y: Tensor  # d y -> d c
    o: Optional  # d y -> d o


def _factors(cell: Cell, blocks: Tensor, c: Tensor, peephole: Optional) -> _Factors:
    part = {name: None if (p := cell.place(name)) is None else blocks[:, :, p] for name in "ifzo"}
    i, z, o = part["i"], part["z"], part["o"]
    assert z is not None
    old = c[:-1]
    squashed = c[1:].tanh() if cell.output_tanh else c[1:]
    ahead = blocks.new_empty(*blocks.shape[:2], cell.front + 1, blocks.shape[-1])
    for place, name in enumerate(cell.gates.replace("o", "")):
        gate = blocks[:, :, place]
        value = old if name == "f" else z - old if cell.coupled else z
        torch.mul(value, gate * (1 - gate), out=ahead[:, :, place])
    slope = 1 - z.square() if cell.input_tanh else torch.ones_like(z)
    torch.mul(slope, 1 if i is None else i, out=ahead[:, :, -1])
    if cell.coupled:
        assert i is not None
        carry = 1 - i
    else:
        carry = torch.ones_like(old) if part["f"] is None else part["f"]
    y = 1 - squashed.square() if cell.output_tanh else torch.ones_like(old)
    k_o = None
    if o is not None:
        y, k_o = y * o, squashed * o * (1 - o)
    if peephole is not None:
        carry = carry + (ahead[:, :, :-1] * peephole[: cell.front]).sum(2)
        y = y if k_o is None else torch.addcmul(y, k_o, peephole[-1])
    return _Factors(ahead, carry, y, k_o)


def _walk_back(
    cell: Cell,
    d: Tensor,
    d_seen: Tensor,
    d_c: Tensor,
    gates: Tensor,
    c: Tensor,
    weight: Tensor,
    peephole: Optional,
) -> None:
    """All steps from the last to the first, in place: `d` is filled, and `d_seen` and `d_c` grow by what later steps say."""
    n, front = d_c.shape[-1], cell.front
    blocks = gates.unflatten(-1, (cell.blocks, n))
    k = _factors(cell, blocks, c, peephole)
    d_blocks = d.unflatten(-1, (cell.blocks, n))
    d_steps, d_ahead = d.unbind(), d_blocks[:, :, : front + 1].unbind()
    d_o = () if k.o is None else d_blocks[:, :, -1].unbind()
    k_o = () if k.o is None else k.o.unbind()
    k_ahead, k_carry, k_y = k.ahead.unbind(), k.carry.unbind(), k.y.unbind()
    ds, dys, dcs, dc_ahead = d_seen.unbind(), d_seen[..., :n].unbind(), d_c.unbind(), d_c[:, :, None].unbind()
    if cell.feedback:
        fed_back = torch.cat([blocks[:, :, :2], blocks[:, :, 3:]], 2)
        slopes = (fed_back * (1 - fed_back)).unbind()
        fed = d_seen[..., n:].unflatten(-1, (3, n)).unbind()
    weight = weight.T.contiguous().T  # the layout in which a product adds up most exactly
    for t in reversed(range(len(d_steps))):
        dcs[t + 1].addcmul_(dys[t + 1], k_y[t])
        if d_o:
            torch.mul(dys[t + 1], k_o[t], out=d_o[t])
        if cell.feedback:
            e = fed[t + 1] * slopes[t]  # to i, f and o from the step after
            d_o[t].add_(e[:, 2])
            if peephole is not None:
                dcs[t + 1].addcmul_(e[:, 2], peephole[2])
                dcs[t].add_((e[:, :2] * peephole[:2]).sum(1))
        torch.mul(dc_ahead[t + 1], k_ahead[t], out=d_ahead[t])
        if cell.feedback:
            d_ahead[t][:, :2].add_(e[:, :2])
        dcs[t].addcmul_(dcs[t + 1], k_carry[t])
        ds[t].addmm_(d_steps[t], weight)


def _seen(cell: Cell, y: Tensor, blocks: Tensor) -> Tensor:
    return torch.cat([y, *blocks[:, :, [0, 1, 3]].unbind(2)], -1) if cell.feedback else y
