"""The Triton kernels of linear_scan, for real recurrences: one pass over the data each way.

    forward   h_t = e^{g_t} h_{t-1} + x_t
    backward  G_t = dy_t + k_{t+1},   k_t = e^{g_t} G_t,   d x_t = G_t,   d g_t = k_t h_{t-1}

A program has a tile of S * L steps of BD channels, cut into S segments of L steps that lie side by side in its threads. It
loads the tile once, steps all segments together from a state of 0, joins their ends by a scan over the S segments, waits
for the state that the tile before hands on, hands on its own, and steps all segments again from the right state. The chain
of tiles is always joined in the same order, so results are bitwise the same from run to run. Tiles are numbered by a
ticket, all columns of the first tile before any of the second: a program waits only for programs that have started.

Every exponent is a sum of log-decays, so it lies in [-inf, 0]. For float32 inputs a decay is kept with what its rounding
lost, as in stepping.py; joins do so whatever the dtype.
"""

import triton
import triton.language as tl

NEAR_ONE = tl.constexpr(-0.35)


@triton.jit
def _expm1_near_zero(g):
    """expm1 on [NEAR_ONE, 0], its series to float32's precision."""
    p = 1.0 / 40320.0
    p = p * g + 1.0 / 5040.0
    p = p * g + 1.0 / 720.0
    p = p * g + 1.0 / 120.0
    p = p * g + 1.0 / 24.0
    p = p * g + 1.0 / 6.0
    p = p * g + 0.5
    p = p * g + 1.0
    return p * g


@triton.jit
def _decay(g, EXACT: tl.constexpr):
    """e^g as rounded, and what the rounding lost; far from one that is of no weight."""
    decay = tl.exp(g)
    lost = tl.zeros_like(g)
    if EXACT:
        near = g > NEAR_ONE
        below_one = _expm1_near_zero(tl.where(near, g, 0.0))
        decay = tl.where(near, 1.0 + below_one, decay)
        lost = tl.where(near, below_one - (decay - 1.0), 0.0)
    return decay, lost


@triton.jit
def _step(decay, lost, h, x, EXACT: tl.constexpr):
    if EXACT:
        return decay * h + (lost * h + x)
    else:
        return decay * h + x


@triton.jit
def _join(g, h, k):
    """e^g h + k."""
    decay, lost = _decay(g, True)
    return _step(decay, lost, h, k, True)


@triton.jit
def _combine(g_1, k_1, g_2, k_2):
    return g_1 + g_2, tl.exp(g_2) * k_1 + k_2


@triton.jit
def _before_segments(G, k, s, S: tl.constexpr, BD: tl.constexpr):
    """From each segment's sum of g and end state, [S, BD]: the same of all that lies before it, and of the tile [BD]."""
    G, k = tl.associative_scan((G, k), 0, _combine)
    G_tile = tl.sum(tl.where(s == S - 1, G, 0.0), 0)
    k_tile = tl.sum(tl.where(s == S - 1, k, 0.0), 0)
    previous = tl.broadcast_to(tl.maximum(s - 1, 0), [S, BD])
    G = tl.where(s > 0, tl.gather(G, previous, 0), 0.0)
    k = tl.where(s > 0, tl.gather(k, previous, 0), 0.0)
    return G, k, G_tile, k_tile


@triton.jit
def _column(ready_ptr, B, D, CHAINED: tl.constexpr, BD: tl.constexpr):
    """Which tile and which columns this program has: tile, column, columns, b, d [BD]."""
    blocks = tl.cdiv(D, BD)
    ticket = tl.program_id(0)
    if CHAINED:
        ticket = tl.atomic_add(ready_ptr, 1)
    column = ticket % (B * blocks)
    d = (column % blocks) * BD + tl.arange(0, BD)
    return ticket // (B * blocks), column, B * blocks, (column // blocks).to(tl.int64), d


@triton.jit
def _through(
    carry,
    G_tile,
    k_tile,
    tile,
    tiles,
    column,
    columns,
    inside,
    carry_ptr,
    ready_ptr,
    CHAINED: tl.constexpr,
    BD: tl.constexpr,
):
    """The state before the tile and the one after it; `carry` is the one before the first tile."""
    if CHAINED:
        slot = tile.to(tl.int64) * columns + column
        place = carry_ptr + slot * BD + tl.arange(0, BD)
        if tile > 0:
            while tl.atomic_add(ready_ptr + slot + 1 - columns, 0, sem="acquire") == 0:
                pass
            carry = tl.load(place - columns.to(tl.int64) * BD, mask=inside, other=0.0, cache_modifier=".cg")
        end = _join(G_tile, carry, k_tile)
        if tile < tiles - 1:
            tl.store(place, end, mask=inside)
            tl.debug_barrier()
            tl.atomic_xchg(ready_ptr + slot + 1, 1, sem="release")
    else:
        end = _join(G_tile, carry, k_tile)
    return carry, end


@triton.jit
def _place(i, T, sequence_ptr, REVERSE: tl.constexpr, PACKED: tl.constexpr):
    """Where step i is in time, its sequence (-1 is none), and whether it is the first or the last step of that."""
    t = T - 1 - i if REVERSE else i
    if PACKED:
        one = -1 if REVERSE else 1
        sequence = tl.load(sequence_ptr + t, mask=i < T, other=-1)
        before = tl.load(sequence_ptr + t - one, mask=(i > 0) & (i < T), other=-1)
        after = tl.load(sequence_ptr + t + one, mask=i < T - 1, other=-1)
        begins, ends = (sequence >= 0) & (sequence != before), (sequence >= 0) & (sequence != after)
    else:
        sequence, begins, ends = t, i == 0, i == T - 1
    return t.to(tl.int64), sequence.to(tl.int64), begins, ends


@triton.jit(do_not_specialize=["T", "B", "tiles"])
def forward_kernel(
    g_ptr,
    x_ptr,
    state_ptr,
    sequence_ptr,
    out_ptr,
    final_ptr,
    carry_ptr,
    ready_ptr,
    T,
    D,
    B,
    tiles,
    g_row,
    g_step,
    x_row,
    x_step,
    CONSTANT: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    EXACT: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    tile, column, columns, b, d = _column(ready_ptr, B, D, CHAINED, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    first = tile * (S * L) + s * L

    decays, losts, xs = (), (), ()
    G, k = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    for l in tl.static_range(L):
        t, sequence, begins, ends = _place(first + l, T, sequence_ptr, REVERSE, PACKED)
        here = (first + l < T) & (sequence >= 0) & inside[None, :]
        x = tl.load(x_ptr + b * x_row + t * x_step + d[None, :], mask=here, other=0.0)
        if CONSTANT:
            g = tl.load(g_ptr + d[None, :], mask=here, other=0.0).to(tl.float32)
        else:
            g = tl.load(g_ptr + b * g_row + t * g_step + d[None, :], mask=here, other=0.0).to(tl.float32)
        decay, lost = _decay(g, EXACT)
        if PACKED:
            if HAS_STATE:
                h_0 = tl.load(state_ptr + sequence * D + d[None, :], mask=here & begins, other=0.0)
                x = _step(decay, lost, h_0, x.to(tl.float32), EXACT)
            cut = begins | (sequence < 0)
            g, decay, lost = (
                tl.where(cut, float("-inf"), g),
                tl.where(cut, 0.0, decay),
                tl.where(cut, 0.0, lost),
            )
        G, k = G + g, _step(decay, lost, k, x.to(tl.float32), EXACT)
        decays, losts, xs = decays + (decay,), losts + (lost,), xs + (x,)

    carry = tl.zeros([BD], tl.float32)
    if HAS_STATE and not PACKED:
        carry = tl.load(state_ptr + b * D + d, mask=inside, other=0.0)
    G, k, G_tile, k_tile = _before_segments(G, k, s, S, BD)
    carry, end = _through(
        carry, G_tile, k_tile, tile, tiles, column, columns, inside, carry_ptr, ready_ptr, CHAINED, BD
    )
    if not PACKED:  # noqa: SIM102 (known when compiled, the other one is not)
        if tile == tiles - 1:
            tl.store(final_ptr + b * D + d, end, mask=inside)

    h = _join(G, carry[None, :], k)
    for l in tl.static_range(L):
        t, sequence, begins, ends = _place(first + l, T, sequence_ptr, REVERSE, PACKED)
        here = (first + l < T) & inside[None, :]
        h = _step(decays[l], losts[l], h, xs[l].to(tl.float32), EXACT)
        tl.store(out_ptr + (b * T + t) * D + d[None, :], h, mask=here)
        if PACKED:
            tl.store(final_ptr + sequence * D + d[None, :], h, mask=here & ends)


@triton.jit(do_not_specialize=["T", "B", "tiles"])
def backward_kernel(
    g_ptr,
    dy_ptr,
    h_ptr,
    state_ptr,
    d_final_ptr,
    sequence_ptr,
    dg_ptr,
    dx_ptr,
    d_state_ptr,
    carry_ptr,
    ready_ptr,
    T,
    D,
    B,
    tiles,
    g_row,
    g_step,
    dy_row,
    dy_step,
    CONSTANT: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    EXACT: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    """REVERSE is this kernel's own direction, against that of the scan."""
    tile, column, columns, b, d = _column(ready_ptr, B, D, CHAINED, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    first = tile * (S * L) + s * L
    one = -1 if REVERSE else 1

    decays, losts, dys, hs = (), (), (), ()
    G, k = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    for l in tl.static_range(L):
        t, sequence, begins, ends = _place(first + l, T, sequence_ptr, REVERSE, PACKED)
        here = (first + l < T) & (sequence >= 0) & inside[None, :]
        dy = tl.load(dy_ptr + b * dy_row + t * dy_step + d[None, :], mask=here, other=0.0)
        if CONSTANT:
            g = tl.load(g_ptr + d[None, :], mask=here, other=0.0).to(tl.float32)
        else:
            g = tl.load(g_ptr + b * g_row + t * g_step + d[None, :], mask=here, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + (b * T + t + one) * D + d[None, :], mask=here & (ends == 0), other=0.0)
        if HAS_STATE:
            row = sequence if PACKED else b
            h = h.to(tl.float32) + tl.load(state_ptr + row * D + d[None, :], mask=here & ends, other=0.0)
        if PACKED:
            dy = dy.to(tl.float32) + tl.load(
                d_final_ptr + sequence * D + d[None, :], mask=here & begins, other=0.0
            )
        decay, lost = _decay(g, EXACT)
        dx = k + dy.to(tl.float32)
        G, k = G + g, _step(decay, lost, dx, 0.0, EXACT)
        if PACKED:
            G, k = tl.where(ends, float("-inf"), G), tl.where(ends, 0.0, k)
        decays, losts, dys, hs = decays + (decay,), losts + (lost,), dys + (dy,), hs + (h,)

    carry = tl.zeros([BD], tl.float32)
    if not PACKED:
        carry = tl.load(d_final_ptr + b * D + d, mask=inside, other=0.0)
    G, k, G_tile, k_tile = _before_segments(G, k, s, S, BD)
    carry, end = _through(
        carry, G_tile, k_tile, tile, tiles, column, columns, inside, carry_ptr, ready_ptr, CHAINED, BD
    )
    if not PACKED:  # noqa: SIM102 (known when compiled, the other one is not)
        if tile == tiles - 1:
            tl.store(d_state_ptr + b * D + d, end, mask=inside)

    k = _join(G, carry[None, :], k)
    total = tl.zeros([S, BD], tl.float32)
    for l in tl.static_range(L):
        t, sequence, begins, ends = _place(first + l, T, sequence_ptr, REVERSE, PACKED)
        here = (first + l < T) & inside[None, :]
        dx = k + dys[l].to(tl.float32)
        k = _step(decays[l], losts[l], dx, 0.0, EXACT)
        dg = k * hs[l].to(tl.float32)
        if PACKED:
            dx, dg = tl.where(sequence >= 0, dx, 0.0), tl.where(sequence >= 0, dg, 0.0)
            tl.store(d_state_ptr + sequence * D + d[None, :], k, mask=here & ends)
            k = tl.where(ends | (sequence < 0), 0.0, k)
        at = (b * T + t) * D + d[None, :]
        tl.store(dx_ptr + at, dx, mask=here)
        if CONSTANT:
            total += tl.where(here, dg, 0.0)
        else:
            tl.store(dg_ptr + at, dg, mask=here)
    if CONSTANT:
        tl.store(dg_ptr + (tile.to(tl.int64) * B + b) * D + d, tl.sum(total, 0), mask=inside)
