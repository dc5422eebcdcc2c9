"""The Triton kernels of forget_gate: all of it in one pass over the data each way.

    p, s = sigmoid(z), sigmoid(-z)        o = 1 - gamma        f = gamma + o p        w = 1 - f = o s
    forward   log f        u = w act(x)
    backward  dw = act(x) du        dz = s (o p / f dlog_f - o p dw)        dx = w act'(x) du
              d gamma = sum of s (dlog_f / f - dw)

A program has tiles of ROWS tokens and BD channels, eight of them side by side to a thread. The forward pass has one tile a program,
the backward pass `span` of them, over which it adds up d gamma; the sums of the programs are added up outside. An exponent is -|z| or
-|x|. Two numbers of x a channel (PAIRS) are read and written as one word.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number
FAR = tl.constexpr(128.0)  # e^-FAR is 0
LOG2_E = tl.constexpr(1.4426950216293335)  # as float32 has it
LOG2_E_LEFT = tl.constexpr(1.9259629911266175e-8)  # and what that leaves
LN_2 = tl.constexpr(0.6931471805599453)
SQRT_HALF = tl.constexpr(0x3F3504F3)  # the bits of sqrt(1 / 2)
STEPLESS = ["floor", "rest", "rows", "span"]  # no other kernel for another bound, B or T


@triton.jit
def sigmoids(x):
    """sigmoid(x), sigmoid(-x) and e^-|x|, all to float32's precision: the exponent is carried with what its rounding loses."""
    a = tl.abs(x)
    a = tl.where(a > FAR, FAR, a)
    t = a * -LOG2_E
    left = tl.fma(a, -LOG2_E, -t) - a * LOG2_E_LEFT
    e = tl.exp2(t)
    e = tl.fma(e, left * LN_2, e)
    large = 1 / (1 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small), e


@triton.jit
def log_1p(x):
    """log(1 + x) for x in [-0.3, 0.42], by log((1 + r) / (1 - r)) with r = x / (2 + x): no division rounds the first term."""
    r = x / (2 + x)
    q = r * r
    p = q * (2 / 9) + 2 / 7
    p = p * q + 2 / 5
    p = p * q + 2 / 3
    half = 0.5 * x * x
    return x - (half - r * (p * q + half))


@triton.jit
def log_gate(z, e, f, w, BOUNDED: tl.constexpr):
    """log f: of 1 - w where that is more exact than f, else of f; without a bound min(z, 0) - log(1 + e), where e is e^-|z|."""
    if BOUNDED:
        v = tl.where(w < 0.5, 1 - w, f)
        bits = v.to(tl.int32, bitcast=True)
        k = (
            bits - SQRT_HALF
        ) >> 23  # v = 2^k m with m in [sqrt(1 / 2), sqrt(2)), and m - 1 is -w where k is 0
        m = (bits - (k << 23)).to(tl.float32, bitcast=True)
        log_f = log_1p(tl.where(k == 0, -w, m - 1)) + k.to(tl.float32) * LN_2
        return tl.where(w == w, log_f, w)  # NaN has no k
    else:
        halved = e > 0.41421356
        log_2 = tl.where(halved, LN_2, 0.0)
        return tl.minimum(z, 0.0) - (log_1p(tl.where(halved, 0.5 * e - 0.5, e)) + log_2)


@triton.jit
def gate(z, gamma, o, BOUNDED: tl.constexpr):
    """p, s, e^-|z|, and f, held at TINY as torch's form is, and w."""
    p, s, e = sigmoids(z)
    if BOUNDED:
        f = gamma + o * p
        return p, s, e, tl.where(f < TINY, TINY, f), o * s
    else:
        return p, s, e, p, s


@triton.jit
def bounds(gamma_ptr, open_ptr, floor, rest, d, inside, BOUND: tl.constexpr, OPEN: tl.constexpr):
    """gamma and 1 - gamma, a row [1, BD] of them or a number."""
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
    return x * sigmoids(x)[0] if SILU else x


@triton.jit
def act_and_slope(x, SILU: tl.constexpr):
    if SILU:
        p, s, _ = sigmoids(x)
        return x * p, p * (1 + x * s)
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=STEPLESS)
def forward_kernel(
    z_ptr, gamma_ptr, open_ptr, x_ptr, log_f_ptr, u_ptr, floor, rest, rows, z_row, x_row, D,
    BOUND: tl.constexpr, OPEN: tl.constexpr, X: tl.constexpr, U: tl.constexpr, PAIRS: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """X is the dtype of x, None where there is none; U that of u. The strides of x are of words where it is PAIRS."""
    columns = tl.cdiv(D, BD)
    d = (tl.program_id(0) % columns) * BD + tl.arange(0, BD)[None, :]
    row = (tl.program_id(0) // columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    here = (row < rows) & (d < D)
    gamma, o = bounds(gamma_ptr, open_ptr, floor, rest, d, d < D, BOUND, OPEN)
    z = tl.load(z_ptr + row * z_row + d, here, 0.0).to(tl.float32)
    if X is not None:
        x = tl.load(x_ptr + row * x_row + d, here, 0)
    _, _, e, f, w = gate(z, gamma, o, BOUND is not None)
    at = row * D + d
    tl.store(log_f_ptr + at, log_gate(z, e, f, w, BOUND is not None), here)
    if PAIRS:
        first, second = pair_of(x, X)
        tl.store(u_ptr + at, word_of(w * act(first, SILU), w * act(second, SILU), U), here)
    elif X is not None:
        tl.store(u_ptr + at, w * act(x.to(tl.float32), SILU), here)
    else:
        tl.store(u_ptr + at, w, here)


@triton.jit(do_not_specialize=STEPLESS)
def backward_kernel(
    d_log_f_ptr, d_u_ptr, z_ptr, gamma_ptr, open_ptr, x_ptr, d_z_ptr, d_x_ptr, d_gamma_ptr, floor, rest, rows, span,
    d_log_f_row, d_u_row, z_row, x_row, D,
    BOUND: tl.constexpr, OPEN: tl.constexpr, X: tl.constexpr, U: tl.constexpr, PAIRS: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_gamma_ptr is [programs, D], of the programs of a column of tiles."""
    columns = tl.cdiv(D, BD)
    d = (tl.program_id(0) % columns) * BD + tl.arange(0, BD)[None, :]
    program = (tl.program_id(0) // columns).to(tl.int64)
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
        p, s, _, f, w = gate(z, gamma, o, BOUND is not None)
        if PAIRS:
            first, second = pair_of(x, X)
            d_first, d_second = pair_of(d_u, U)
            first, slope_1 = act_and_slope(first, SILU)
            second, slope_2 = act_and_slope(second, SILU)
            d_w = first * d_first + second * d_second
            tl.store(d_x_ptr + at, word_of(w * d_first * slope_1, w * d_second * slope_2, X), here)
        elif X is not None:
            value, slope = act_and_slope(x.to(tl.float32), SILU)
            d_w = value * d_u.to(tl.float32)
            tl.store(d_x_ptr + at, w * d_u.to(tl.float32) * slope, here)
        else:
            d_w = d_u.to(tl.float32)
        if BOUND is None:
            d_z = s * (d_log_f - p * d_w)
        else:
            over_f = tl.where(f > TINY, 1 / f, 0.0)
            d_z = s * (o * p * over_f * d_log_f - o * p * d_w)
        tl.store(d_z_ptr + at, d_z, here)
        if BOUND == "tensor":
            total += s * (over_f * d_log_f - d_w)
    if BOUND == "tensor":
        tl.store(d_gamma_ptr + program * D + d, tl.sum(total, 0)[None, :], d < D)
