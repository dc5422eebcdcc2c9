"""The Triton kernels of forget_gate: all of it in one pass over the data each way.

    p, s = sigmoid(z), sigmoid(-z)        o = 1 - gamma        f = gamma + o p        w = 1 - f = o s
    forward   log f        u = w act(x)
    backward  dw = act(x) du        dz = s (o p / f dlog_f - o p dw)        dx = w act'(x) du
              d gamma = sum of s (dlog_f / f - dw)

A program has tiles of ROWS tokens and BD channels: forward one, backward `span` of them, over which it adds up d gamma.
The sums of the programs are added up outside. Exponents are -|z| and -x, this one held at 88. Two numbers of x a channel
(PAIRS) are read and written as one word. An element takes about 60 instructions, for which a GPU has not much longer than for
its bytes: so these are few, and no more exact than float32 needs.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.693147182464599609375)  # as float32 has it
LN_2_LEFT = tl.constexpr(-1.904654290582768e-09)  # and what that leaves
LOWEST = tl.constexpr(-88.0)  # e^88 is finite
HIGHEST = tl.constexpr(128.0)  # e^-128 is 0
ANY_NAN = tl.constexpr(tl.PropagateNan.ALL)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
VARYING = ["floor", "rest", "rows", "span"]  # no other kernel for another bound, B or T


@triton.jit
def divided(a, b):
    """a / b for a normal b up to 2^126, at a quarter of the instructions."""
    if INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def exp_of_minus(a):
    """e^-a to float32's precision: what rounding loses of the exponent is made good behind."""
    t = a * -LOG2_E
    left = tl.fma(t, -LN_2_LEFT, tl.fma(t, -LN_2, -a))
    e = tl.exp2(t)
    return tl.fma(e, left, e)


@triton.jit
def log_1p(x):
    """log(1 + x) for x in [-0.5, 1], by log((1 + r) / (1 - r)) with r = x / (2 + x): no division rounds the first term.

    The polynomial is fitted to (log((1 + r) / (1 - r)) / r - 2) / r^2, with an error of 6e-9 of the logarithm.
    """
    r = divided(x, 2 + x)
    q = r * r
    p = q * 0.2802763879299164 + 0.27998173236846924
    p = p * q + 0.4002179205417633
    p = p * q + 0.6666641235351562
    half = 0.5 * x * x
    return x - (half - r * (p * q + half))


@triton.jit
def gate(z, gamma, o, BOUNDED: tl.constexpr):
    """p, s, f, w, and e^-|z|; f is held at TINY, as torch's form is."""
    e = exp_of_minus(tl.minimum(tl.abs(z), HIGHEST, propagate_nan=ANY_NAN))
    large = divided(1.0, 1 + e)
    small = e * large
    p, s = tl.where(z < 0, small, large), tl.where(z < 0, large, small)
    if BOUNDED:
        return p, s, tl.maximum(gamma + o * p, TINY, propagate_nan=ANY_NAN), o * s, e
    else:
        return p, s, p, s, e


@triton.jit
def log_gate(z, f, w, e, BOUNDED: tl.constexpr):
    """log f: of 1 - w where that is more exact than f, else of f; without a bound min(z, 0) - log(1 + e)."""
    if BOUNDED:
        near = w < 0.5
        far = tl.log2(f) if INTERPRETED else libdevice.fast_log2f(f)
        return tl.where(near, log_1p(tl.where(near, -w, 0.0)), far * LN_2)
    else:
        return tl.minimum(z, 0.0) - log_1p(e)


@triton.jit
def place_of(D, BD: tl.constexpr):
    """Which program in its column of tiles this is, and the channels [BD] of the column."""
    columns = tl.cdiv(D, BD)
    channels = (tl.program_id(0) % columns) * BD + tl.arange(0, BD)
    return (tl.program_id(0) // columns).to(tl.int64), channels


@triton.jit
def bounds(gamma_ptr, open_ptr, floor, rest, d, inside, BOUND: tl.constexpr, OPEN: tl.constexpr):
    """gamma and 1 - gamma: numbers, or a tile, which each thread loads for itself: a row would go through shared memory."""
    if BOUND == "tensor":
        gamma = tl.load(gamma_ptr + d, inside, 0.0).to(tl.float32)
        o = tl.load(open_ptr + d, inside, 0.0).to(tl.float32) if OPEN else 1 - gamma
        return gamma, o
    else:
        return floor, rest


@triton.jit
def pair_of(word, DTYPE: tl.constexpr):
    """The two floats of a word, of which the first is in its lower bits."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    INT: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    first = word.to(INT).to(DTYPE, bitcast=True)
    second = (word >> BITS).to(INT).to(DTYPE, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def word_of(first, second, DTYPE: tl.constexpr):
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    INT: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
    WORD: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    lower = first.to(DTYPE).to(INT, bitcast=True).to(WORD)
    return (second.to(DTYPE).to(INT, bitcast=True).to(WORD) << BITS) | lower


@triton.jit
def act(x, SILU: tl.constexpr):
    """act(x) and its slope."""
    if SILU:
        e = exp_of_minus(tl.maximum(x, LOWEST, propagate_nan=ANY_NAN))
        p = divided(1.0, 1 + e)
        return x * p, p * (1 + x * (e * p))
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    z_ptr, gamma_ptr, open_ptr, x_ptr, log_f_ptr, u_ptr, floor, rest, rows, z_row, x_row, D,
    BOUND: tl.constexpr, OPEN: tl.constexpr, X: tl.constexpr, U: tl.constexpr, PAIRS: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """X is the dtype of x, None where there is none; U that of u. The strides of x are of words where it is PAIRS."""
    program, column = place_of(D, BD)
    d = tl.broadcast_to(column[None, :], [ROWS, BD])
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    here = (row < rows) & (d < D)
    gamma, o = bounds(gamma_ptr, open_ptr, floor, rest, d, d < D, BOUND, OPEN)
    z = tl.load(z_ptr + row * z_row + d, here, 0.0).to(tl.float32)
    if X is not None:
        x = tl.load(x_ptr + row * x_row + d, here, 0)
    _, _, f, w, e = gate(z, gamma, o, BOUND is not None)
    at = row * D + d
    tl.store(log_f_ptr + at, log_gate(z, f, w, e, BOUND is not None), here)
    if PAIRS:
        first, second = pair_of(x, X)
        tl.store(u_ptr + at, word_of(w * act(first, SILU)[0], w * act(second, SILU)[0], U), here)
    elif X is not None:
        tl.store(u_ptr + at, w * act(x.to(tl.float32), SILU)[0], here)
    else:
        tl.store(u_ptr + at, w, here)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    d_log_f_ptr, d_u_ptr, z_ptr, gamma_ptr, open_ptr, x_ptr, d_z_ptr, d_x_ptr, d_gamma_ptr, floor, rest, rows, span,
    d_log_f_row, d_u_row, z_row, x_row, D,
    BOUND: tl.constexpr, OPEN: tl.constexpr, X: tl.constexpr, U: tl.constexpr, PAIRS: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_gamma_ptr is [programs, D], of the programs of a column of tiles."""
    program, column = place_of(D, BD)
    d = tl.broadcast_to(column[None, :], [ROWS, BD])
    gamma, o = bounds(gamma_ptr, open_ptr, floor, rest, d, d < D, BOUND, OPEN)
    total = tl.zeros([ROWS, BD], tl.float32)
    for tile in range(span):
        row = (program * span + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        here = (row < rows) & (d < D)
        at = row * D + d
        z = tl.load(z_ptr + row * z_row + d, here, 0.0).to(tl.float32)
        d_log_f = tl.load(d_log_f_ptr + row * d_log_f_row + d, here, 0.0)
        d_u = tl.load(d_u_ptr + row * d_u_row + d, here, 0)
        if X is not None:
            x = tl.load(x_ptr + row * x_row + d, here, 0)
        p, s, f, w, _ = gate(z, gamma, o, BOUND is not None)
        if PAIRS:
            first, second = pair_of(x, X)
            d_first, d_second = pair_of(d_u, U)
            first, slope_1 = act(first, SILU)
            second, slope_2 = act(second, SILU)
            d_w = first * d_first + second * d_second
            tl.store(d_x_ptr + at, word_of(w * d_first * slope_1, w * d_second * slope_2, X), here)
        elif X is not None:
            value, slope = act(x.to(tl.float32), SILU)
            d_w = value * d_u.to(tl.float32)
            tl.store(d_x_ptr + at, w * d_u.to(tl.float32) * slope, here)
        else:
            d_w = d_u.to(tl.float32)
        if BOUND is None:
            d_z = s * (d_log_f - p * d_w)
        else:
            over_f = tl.where(f > TINY, divided(1.0, f), 0.0)
            d_z = s * (o * p * over_f * d_log_f - o * p * d_w)
        tl.store(d_z_ptr + at, d_z, here)
        if BOUND == "tensor":
            total += s * (over_f * d_log_f - d_w)
    if BOUND == "tensor":
        tl.store(d_gamma_ptr + program * D + column, tl.sum(total, 0), column < D)
