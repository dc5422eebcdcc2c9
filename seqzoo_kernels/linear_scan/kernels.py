"""The Triton kernels of linear_scan, for real recurrences: one pass over the data each way.

    forward   h_t = e^{g_t} h_{t-1} + x_t
    backward  G_t = dy_t + k_{t+1},   k_t = e^{g_t} G_t,   d x_t = G_t,   d g_t = k_t h_{t-1}

A program has a tile of S * L steps of BD channels, cut into S segments of L steps, one to a warp. It loads the tile once, steps
all segments together from a state of 0, joins their ends by a scan over the S segments, makes the total of the tile known,
looks back for the state before the tile, and steps all segments again from the right state.
"""

import triton
import triton.language as tl

from .lookback import before_segments, column_of, decay_of, join, place_of, step, through

# No other kernel for another length: strides of rows come divided by ALIGNED, which does not depend on it.
LENGTHS = ["T", "B", "tiles", "g_row", "x_row", "dy_row"]


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    g_ptr,
    x_ptr,
    state_ptr,
    sequence_ptr,
    out_ptr,
    final_ptr,
    words_ptr,
    T,
    B,
    tiles,
    g_row,
    x_row,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    g_step: tl.constexpr,
    x_step: tl.constexpr,
    CONSTANT: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    tile, column, b, d = column_of(B, D, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    i = tile * (S * L) + s * L  # of each segment: steps before it, and left from there on
    n = T - i
    t = (T - 1 - i if REVERSE else i).to(tl.int64)
    one: tl.constexpr = -1 if REVERSE else 1
    g_tile = g_ptr + b * g_row * ALIGNED + t * g_step + d[None, :]
    x_tile = x_ptr + b * x_row * ALIGNED + t * x_step + d[None, :]
    out_tile = out_ptr + (b * T + t) * D + d[None, :]

    decays, rests, xs = (), (), ()
    G, k = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    if CONSTANT:
        g_0 = tl.load(g_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        x = tl.load(x_tile + one * l * x_step, mask=here, other=0.0)
        if CONSTANT:
            g = tl.where(here, g_0, 0.0)
        else:
            g = tl.load(g_tile + one * l * g_step, mask=here, other=0.0).to(tl.float32)
        decay, rest = decay_of(g, EXACT)
        if PACKED:
            if HAS_STATE:
                h_0 = tl.load(state_ptr + sequence * D + d[None, :], mask=here & begins, other=0.0)
                x = step(decay, rest, h_0, x.to(tl.float32), EXACT)
            cut = begins | (sequence < 0)
            g, decay, rest = (
                tl.where(cut, float("-inf"), g),
                tl.where(cut, 0.0, decay),
                tl.where(cut, 0.0, rest),
            )
        G, k = G + g, step(decay, rest, k, x.to(tl.float32), EXACT)
        decays, rests, xs = decays + (decay,), rests + (rest,), xs + (x,)

    carry = tl.zeros([BD], tl.float32)
    if HAS_STATE and not PACKED:
        carry = tl.load(state_ptr + b * D + d, mask=inside, other=0.0)
    G, k, G_tile, k_tile = before_segments(G, k, s, S, BD, EXACT)
    carry, end = through(
        carry, G_tile, k_tile, tile, tiles, column, inside, words_ptr, CHAINED, GROUP, EXACT, BD
    )
    if not PACKED:  # noqa: SIM102 (known when compiled, the other one is not)
        if tile == tiles - 1:
            tl.store(final_ptr + b * D + d, end, mask=inside)

    h = join(G, carry[None, :], k, EXACT)
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        h = step(decays[l], rests[l], h, xs[l].to(tl.float32), EXACT)
        tl.store(out_tile + one * l * D, h, mask=here)
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            tl.store(final_ptr + sequence * D + d[None, :], h, mask=here & ends)


@triton.jit(do_not_specialize=LENGTHS)
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
    words_ptr,
    T,
    B,
    tiles,
    g_row,
    dy_row,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    g_step: tl.constexpr,
    dy_step: tl.constexpr,
    CONSTANT: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    """REVERSE is this kernel's own direction, against that of the scan."""
    tile, column, b, d = column_of(B, D, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    i = tile * (S * L) + s * L  # of each segment: steps before it, and left from there on
    n = T - i
    t = (T - 1 - i if REVERSE else i).to(tl.int64)
    one: tl.constexpr = -1 if REVERSE else 1
    g_tile = g_ptr + b * g_row * ALIGNED + t * g_step + d[None, :]
    dy_tile = dy_ptr + b * dy_row * ALIGNED + t * dy_step + d[None, :]
    at = (b * T + t) * D + d[None, :]

    decays, rests, dys = (), (), ()
    G, k = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    if CONSTANT:
        g_0 = tl.load(g_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        dy = tl.load(dy_tile + one * l * dy_step, mask=here, other=0.0)
        if CONSTANT:
            g = tl.where(here, g_0, 0.0)
        else:
            g = tl.load(g_tile + one * l * g_step, mask=here, other=0.0).to(tl.float32)
        decay, rest = decay_of(g, EXACT)
        if PACKED:
            d_final = tl.load(d_final_ptr + sequence * D + d[None, :], mask=here & begins, other=0.0)
            dy = dy.to(tl.float32) + d_final
        G, k = G + g, step(decay, rest, k + dy.to(tl.float32), 0.0, EXACT)
        if PACKED:
            G, k = tl.where(ends, float("-inf"), G), tl.where(ends, 0.0, k)
        decays, rests, dys = decays + (decay,), rests + (rest,), dys + (dy,)

    hs = ()  # the state before each step of the scan, which is the one after it here
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        else:
            sequence, ends = b, l == n - 1
        h = tl.load(h_ptr + at + one * (l + 1) * D, mask=here & (ends == 0), other=0.0)
        if HAS_STATE:
            h = h.to(tl.float32) + tl.load(state_ptr + sequence * D + d[None, :], mask=here & ends, other=0.0)
        hs = hs + (h,)

    carry = tl.zeros([BD], tl.float32)
    if not PACKED:
        carry = tl.load(d_final_ptr + b * D + d, mask=inside, other=0.0)
    G, k, G_tile, k_tile = before_segments(G, k, s, S, BD, EXACT)
    carry, end = through(
        carry, G_tile, k_tile, tile, tiles, column, inside, words_ptr, CHAINED, GROUP, EXACT, BD
    )
    if not PACKED:  # noqa: SIM102 (known when compiled, the other one is not)
        if tile == tiles - 1:
            tl.store(d_state_ptr + b * D + d, end, mask=inside)

    k = join(G, carry[None, :], k, EXACT)
    total = tl.zeros([S, BD], tl.float32)
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        dx = k + dys[l].to(tl.float32)
        k = step(decays[l], rests[l], dx, 0.0, EXACT)
        dg = k * hs[l].to(tl.float32)
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            dx, dg = tl.where(sequence >= 0, dx, 0.0), tl.where(sequence >= 0, dg, 0.0)
            tl.store(d_state_ptr + sequence * D + d[None, :], k, mask=here & ends)
            k = tl.where(ends | (sequence < 0), 0.0, k)
        tl.store(dx_ptr + at + one * l * D, dx, mask=here)
        if CONSTANT:
            total += tl.where(here, dg, 0.0)
        else:
            tl.store(dg_ptr + at + one * l * D, dg, mask=here)
    if CONSTANT:
        tl.store(dg_ptr + (tile.to(tl.int64) * B + b) * D + d, tl.sum(total, 0), mask=inside)
