"""The Triton kernels of lstm: all that a step does beside its product, forward and back.

    forward   i, f, z, o = pre-activations -> gates, in place        c_t = f c_{t-1} + i z        y_t = o tanh(c_t)
    backward  dc = d c_t + o tanh'(c_t) dy + p_o do        do = tanh(c_t) o (1 - o) dy
              di, df, dz = z i (1 - i) dc, c_{t-1} f (1 - f) dc, i (1 - z^2) dc
              d c_{t-1} += f dc + p_i di + p_f df

A program has BLOCK of the `total` = N n cells. Buffers are [L, N, G n] and [L + 1, N, n], whole, and `t` says where in them. A
gate's place is that of its block and, but for o, of its peephole; -1 is none, and stands for a gate of 1.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Near 1 as 1 less the rest, so that 1 - sigmoid(x), a factor of the gradient, is as right as can be; so is tanh."""
    e = tl.exp(-tl.abs(x))
    rest = e / (1 + e)
    return tl.where(x < 0, rest, 1 - rest)


@triton.jit
def tanh(x):
    """Near 0 by its series, where 1 less the rest would lose the digits of a small x."""
    s = x * x
    series = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * 62 / 2835))))
    e = tl.exp(-2 * tl.abs(x))
    far = 1 - 2 * e / (1 + e)
    return tl.where(s < 0.0625, series, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["t", "total"])
def forward_kernel(
    gates_ptr, y_ptr, c_ptr, peephole_ptr, t, total,
    n: tl.constexpr, I: tl.constexpr, F: tl.constexpr, Z: tl.constexpr, O: tl.constexpr, G: tl.constexpr,
    COUPLED: tl.constexpr, INPUT_TANH: tl.constexpr, OUTPUT_TANH: tl.constexpr, PEEPHOLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < total
    before = tl.cast(t, tl.int64) * total  # cells of the steps before
    gates = gates_ptr + before * G + (k // n) * (G * n) + k % n
    peepholes = peephole_ptr + k % n
    old = tl.load(c_ptr + before + k, inside)
    z = tl.load(gates + Z * n, inside)
    if INPUT_TANH:
        z = tanh(z)
        tl.store(gates + Z * n, z, inside)
    new, kept = z, old
    if I >= 0:
        i = tl.load(gates + I * n, inside)
        if PEEPHOLES:
            i += tl.load(peepholes + I * n, inside) * old
        i = sigmoid(i)
        tl.store(gates + I * n, i, inside)
        new = i * (z - old if COUPLED else z)
    if F >= 0:
        f = tl.load(gates + F * n, inside)
        if PEEPHOLES:
            f += tl.load(peepholes + F * n, inside) * old
        f = sigmoid(f)
        tl.store(gates + F * n, f, inside)
        kept = f * old
    c = kept + new
    tl.store(c_ptr + before + total + k, c, inside)
    y = tanh(c) if OUTPUT_TANH else c
    if O >= 0:
        o = tl.load(gates + O * n, inside)
        if PEEPHOLES:
            o += tl.load(peepholes + (G - 2) * n, inside) * c
        o = sigmoid(o)
        tl.store(gates + O * n, o, inside)
        y = o * y
    tl.store(y_ptr + before + total + k, y, inside)


@triton.jit(do_not_specialize=["t", "total"])
def backward_kernel(
    d_ptr, dy_ptr, dc_ptr, gates_ptr, c_ptr, peephole_ptr, t, total,
    n: tl.constexpr, I: tl.constexpr, F: tl.constexpr, Z: tl.constexpr, O: tl.constexpr, G: tl.constexpr,
    COUPLED: tl.constexpr, INPUT_TANH: tl.constexpr, OUTPUT_TANH: tl.constexpr, PEEPHOLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < total
    before = tl.cast(t, tl.int64) * total
    place = before * G + (k // n) * (G * n) + k % n
    gates, d = gates_ptr + place, d_ptr + place
    peepholes = peephole_ptr + k % n
    old = tl.load(c_ptr + before + k, inside)
    c = tl.load(c_ptr + before + total + k, inside)
    z = tl.load(gates + Z * n, inside)
    dy = tl.load(dy_ptr + before + total + k, inside)
    dc = tl.load(dc_ptr + before + total + k, inside)
    squashed = tanh(c) if OUTPUT_TANH else c
    to_c = dy
    if O >= 0:
        o = tl.load(gates + O * n, inside)
        d_o = dy * (squashed * o * (1 - o))
        tl.store(d + O * n, d_o, inside)
        to_c = dy * o
        if PEEPHOLES:
            dc += d_o * tl.load(peepholes + (G - 2) * n, inside)
    dc += to_c * (1 - squashed * squashed) if OUTPUT_TANH else to_c
    dz, d_old = dc, dc
    if F >= 0:
        f = tl.load(gates + F * n, inside)
        d_f = dc * (old * f * (1 - f))
        tl.store(d + F * n, d_f, inside)
        d_old = dc * f
        if PEEPHOLES:
            d_old += d_f * tl.load(peepholes + F * n, inside)
    if I >= 0:
        i = tl.load(gates + I * n, inside)
        d_i = dc * ((z - old if COUPLED else z) * i * (1 - i))
        tl.store(d + I * n, d_i, inside)
        dz = dc * i
        if COUPLED:
            d_old = dc * (1 - i)
        if PEEPHOLES:
            d_old += d_i * tl.load(peepholes + I * n, inside)
    tl.store(d + Z * n, dz * (1 - z * z) if INPUT_TANH else dz, inside)
    tl.store(dc_ptr + before + k, tl.load(dc_ptr + before + k, inside) + d_old, inside)
