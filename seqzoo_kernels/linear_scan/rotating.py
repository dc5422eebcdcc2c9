"""The Triton kernels of linear_scan, for complex recurrences: one pass over the data each way, tiled as in kernels.py.

    forward   h_t = a_t h_{t-1} + x_t,   a_t = e^{g_t + i phase_t}
    backward  G_t = dy_t + k_{t+1},      k_t = conj(a_t) G_t,   d x_t = G_t
              z_t = conj(k_t) h_{t-1},   d g_t = Re z_t,        d phase_t = -Im z_t

Complex numbers are read and written whole, as words of 64 bits; states are float32. A decay that is constant in time
(CONSTANT) is read once, and so is a phase (STEADY); where both are, the one factor keeps what its rounding lost (KEEP).
"""

import triton
import triton.language as tl

from .lookback import column_of, place_of
from .rotation import (
    angle_of,
    before_segments,
    exact_factor_of,
    join,
    load,
    modulus_of,
    short,
    step,
    store,
    through,
    turn_of,
)

# No other kernel for another length: strides of rows come divided by ALIGNED, which does not depend on it.
LENGTHS = ["T", "B", "tiles", "g_row", "phase_row", "x_row", "dy_row"]


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    g_ptr,
    phase_ptr,
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
    phase_row,
    x_row,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    g_step: tl.constexpr,
    phase_step: tl.constexpr,
    x_step: tl.constexpr,
    CONSTANT: tl.constexpr,
    STEADY: tl.constexpr,
    COMPLEX: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    """COMPLEX says that x is."""
    tile, column, b, d = column_of(B, D, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    i = tile * (S * L) + s * L  # of each segment: steps before it, and left from there on
    n = T - i
    t = (T - 1 - i if REVERSE else i).to(tl.int64)
    one: tl.constexpr = -1 if REVERSE else 1
    g_tile = g_ptr + b * g_row * ALIGNED + t * g_step + d[None, :]
    phase_tile = phase_ptr + b * phase_row * ALIGNED + t * phase_step + d[None, :]
    x_tile = x_ptr + b * x_row * ALIGNED + t * x_step + d[None, :]
    out_tile = out_ptr + (b * T + t) * D + d[None, :]

    fs_re, fs_im, losts_re, losts_im, xs_re, xs_im = (), (), (), (), (), ()
    G, A = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.int64)
    k_re, k_im = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    KEEP: tl.constexpr = CONSTANT and STEADY
    if CONSTANT:
        g = tl.load(g_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    if STEADY:
        phase = tl.load(phase_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        angle = angle_of(phase)
        turn_re, turn_im, lost_re, lost_im = exact_factor_of(g if KEEP else tl.zeros_like(phase), angle)
        turn_re += 0.0 * phase  # a phase that is NaN
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        x_re, x_im = load(x_tile + one * l * x_step, here, COMPLEX)
        if not CONSTANT:
            g = tl.load(g_tile + one * l * g_step, mask=here, other=0.0).to(tl.float32)
        if not STEADY:
            phase = tl.load(phase_tile + one * l * phase_step, mask=here, other=0.0)
            angle = angle_of(phase)
            turn_re, turn_im = turn_of(short(angle))
            turn_re += 0.0 * phase.to(tl.float32)
        f_re, f_im = turn_re, turn_im
        if not KEEP:
            modulus = modulus_of(g)
            f_re, f_im, lost_re, lost_im = modulus * f_re, modulus * f_im, f_re, f_im  # nothing is kept
        if PACKED:
            if HAS_STATE:
                h_re, h_im = load(state_ptr + sequence * D + d[None, :], here & begins, True)
                x_re, x_im = step(f_re, f_im, lost_re, lost_im, h_re, h_im, x_re, x_im, KEEP)
            cut = begins | (sequence < 0)
            G = tl.where(cut, float("-inf"), G)
            f_re, f_im = tl.where(cut, 0.0, f_re), tl.where(cut, 0.0, f_im)
            lost_re, lost_im = tl.where(cut, 0.0, lost_re), tl.where(cut, 0.0, lost_im)
        G, A = G + g, A + angle
        k_re, k_im = step(f_re, f_im, lost_re, lost_im, k_re, k_im, x_re, x_im, KEEP)
        fs_re, fs_im, xs_re, xs_im = fs_re + (f_re,), fs_im + (f_im,), xs_re + (x_re,), xs_im + (x_im,)
        losts_re, losts_im = losts_re + (lost_re,), losts_im + (lost_im,)

    re, im = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if HAS_STATE and not PACKED:
        re, im = load(state_ptr + b * D + d, inside, True)
    f_re, f_im, k_re, k_im, G_tile, A_tile, re_tile, im_tile = before_segments(G, A, k_re, k_im, s, S, BD)
    if CHAINED:
        re, im = through(
            re, im, G_tile, A_tile, re_tile, im_tile, tile, tiles, column, inside, words_ptr, GROUP, BD
        )

    h_re, h_im = join(f_re, f_im, re[None, :], im[None, :], k_re, k_im)
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        h_re, h_im = step(fs_re[l], fs_im[l], losts_re[l], losts_im[l], h_re, h_im, xs_re[l], xs_im[l], KEEP)
        store(out_tile + one * l * D, h_re, h_im, here)
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
        else:
            sequence, ends = b + tl.zeros_like(t), l == n - 1
        store(final_ptr + sequence * D + d[None, :], h_re, h_im, here & ends)


@triton.jit(do_not_specialize=LENGTHS)
def backward_kernel(
    g_ptr,
    phase_ptr,
    dy_ptr,
    h_ptr,
    state_ptr,
    d_final_ptr,
    sequence_ptr,
    dg_ptr,
    dphase_ptr,
    dx_ptr,
    d_state_ptr,
    words_ptr,
    T,
    B,
    tiles,
    g_row,
    phase_row,
    dy_row,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    g_step: tl.constexpr,
    phase_step: tl.constexpr,
    dy_step: tl.constexpr,
    CONSTANT: tl.constexpr,
    STEADY: tl.constexpr,
    COMPLEX: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
):
    """COMPLEX says that x is, and so its gradient; REVERSE is this kernel's own direction, against that of the scan."""
    tile, column, b, d = column_of(B, D, BD)
    inside = d < D
    s = tl.arange(0, S)[:, None]
    i = tile * (S * L) + s * L  # of each segment: steps before it, and left from there on
    n = T - i
    t = (T - 1 - i if REVERSE else i).to(tl.int64)
    one: tl.constexpr = -1 if REVERSE else 1
    g_tile = g_ptr + b * g_row * ALIGNED + t * g_step + d[None, :]
    phase_tile = phase_ptr + b * phase_row * ALIGNED + t * phase_step + d[None, :]
    dy_tile = dy_ptr + b * dy_row * ALIGNED + t * dy_step + d[None, :]
    at = (b * T + t) * D + d[None, :]

    fs_re, fs_im, losts_re, losts_im, dys_re, dys_im = (), (), (), (), (), ()
    G, A = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.int64)
    k_re, k_im = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    KEEP: tl.constexpr = CONSTANT and STEADY
    if CONSTANT:
        g = tl.load(g_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    if STEADY:
        phase = tl.load(phase_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        angle = -angle_of(phase)
        turn_re, turn_im, lost_re, lost_im = exact_factor_of(g if KEEP else tl.zeros_like(phase), angle)
        turn_re += 0.0 * phase  # a phase that is NaN
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        dy_re, dy_im = load(dy_tile + one * l * dy_step, here, True)
        if not CONSTANT:
            g = tl.load(g_tile + one * l * g_step, mask=here, other=0.0).to(tl.float32)
        if not STEADY:
            phase = tl.load(phase_tile + one * l * phase_step, mask=here, other=0.0)
            angle = -angle_of(phase)
            turn_re, turn_im = turn_of(short(angle))
            turn_re += 0.0 * phase.to(tl.float32)
        f_re, f_im = turn_re, turn_im
        if not KEEP:
            modulus = modulus_of(g)
            f_re, f_im, lost_re, lost_im = modulus * f_re, modulus * f_im, f_re, f_im  # nothing is kept
        if PACKED:
            end_re, end_im = load(d_final_ptr + sequence * D + d[None, :], here & begins, True)
            dy_re, dy_im = dy_re + end_re, dy_im + end_im
        G, A = G + g, A + angle
        k_re, k_im = step(f_re, f_im, lost_re, lost_im, k_re + dy_re, k_im + dy_im, 0.0, 0.0, KEEP)
        if PACKED:
            cut = ends | (sequence < 0)
            G = tl.where(cut, float("-inf"), G)
            k_re, k_im = tl.where(cut, 0.0, k_re), tl.where(cut, 0.0, k_im)
        fs_re, fs_im, dys_re, dys_im = fs_re + (f_re,), fs_im + (f_im,), dys_re + (dy_re,), dys_im + (dy_im,)
        losts_re, losts_im = losts_re + (lost_re,), losts_im + (lost_im,)

    re, im = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if not PACKED:
        re, im = load(d_final_ptr + b * D + d, inside, True)
    f_re, f_im, k_re, k_im, G_tile, A_tile, re_tile, im_tile = before_segments(G, A, k_re, k_im, s, S, BD)
    if CHAINED:
        re, im = through(
            re, im, G_tile, A_tile, re_tile, im_tile, tile, tiles, column, inside, words_ptr, GROUP, BD
        )

    # The state before each step of the scan, which is the one after it here: read late, for the registers.
    hs_re, hs_im = (), ()
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            here = here & (sequence >= 0)
        else:
            sequence, ends = b, l == n - 1
        h_re, h_im = load(h_ptr + at + one * (l + 1) * D, here & (ends == 0), True)
        if HAS_STATE:
            h_0_re, h_0_im = load(state_ptr + sequence * D + d[None, :], here & ends, True)
            h_re, h_im = h_re + h_0_re, h_im + h_0_im
        hs_re, hs_im = hs_re + (h_re,), hs_im + (h_im,)

    k_re, k_im = join(f_re, f_im, re[None, :], im[None, :], k_re, k_im)
    total_g, total_phase = tl.zeros([S, BD], tl.float32), tl.zeros([S, BD], tl.float32)
    for l in tl.static_range(L):
        here = (l < n) & inside[None, :]
        dx_re, dx_im = k_re + dys_re[l], k_im + dys_im[l]
        k_re, k_im = step(fs_re[l], fs_im[l], losts_re[l], losts_im[l], dx_re, dx_im, 0.0, 0.0, KEEP)
        dg = k_re * hs_re[l] + k_im * hs_im[l]
        dphase = k_im * hs_re[l] - k_re * hs_im[l]
        if PACKED:
            sequence, begins, ends = place_of(l, n, i, sequence_ptr + t, one)
            none = sequence < 0
            dx_re, dx_im = tl.where(none, 0.0, dx_re), tl.where(none, 0.0, dx_im)
            dg, dphase = tl.where(none, 0.0, dg), tl.where(none, 0.0, dphase)
        else:
            sequence, ends = b + tl.zeros_like(t), l == n - 1
        store(d_state_ptr + sequence * D + d[None, :], k_re, k_im, here & ends)
        if PACKED:
            k_re, k_im = tl.where(ends | none, 0.0, k_re), tl.where(ends | none, 0.0, k_im)
        if COMPLEX:
            store(dx_ptr + at + one * l * D, dx_re, dx_im, here)
        else:
            tl.store(dx_ptr + at + one * l * D, dx_re, mask=here)
        if CONSTANT:
            total_g += tl.where(here, dg, 0.0)
        else:
            tl.store(dg_ptr + at + one * l * D, dg, mask=here)
        if STEADY:
            total_phase += tl.where(here, dphase, 0.0)
        else:
            tl.store(dphase_ptr + at + one * l * D, dphase, mask=here)
    share = (tile.to(tl.int64) * B + b) * D + d
    if CONSTANT:
        tl.store(dg_ptr + share, tl.sum(total_g, 0), mask=inside)
    if STEADY:
        tl.store(dphase_ptr + share, tl.sum(total_phase, 0), mask=inside)
