"""The Triton kernels of gated_norm, all in float32.

    forward     a = act(g)      u = h or h a      z = (u - mean) / s      n = z w + b      y = n a or n
    backward    dn = dy a or dy      dz = dn w      du = (dz - mean(dz z) z - mean(dz)) / s      dw, db = sums of dn z, dn
                before the norm, post_gate:  dh = du a,  dg = du h act'(g);       behind it:  dh = du,  dg = dy n act'(g)

s^2 is the mean of squares and eps; an rms norm takes no means off. A program holds ROWS rows of BLOCK >= N features and, back,
goes on to later ones, adding up dw and db as it goes. The rows of a complex h have real and imaginary parts in turns (TURNS),
and those of all else have the ones behind the others: they are read as two halves and interleaved.
"""

import triton
import triton.language as tl


@triton.jit
def read(ptr, start, inside, N: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Rows from `start` [ROWS, 1] on, where `inside`, 0 beyond: [ROWS, BLOCK]."""
    if TURNS:
        k = tl.arange(0, BLOCK // 2)[None, :]
        mask = inside & (k < N // 2)
        first = tl.load(ptr + start + k, mask, 0.0).to(tl.float32)
        second = tl.load(ptr + start + N // 2 + k, mask, 0.0).to(tl.float32)
        x = tl.reshape(tl.join(first, second), (first.shape[0], BLOCK))
    else:
        k = tl.arange(0, BLOCK)[None, :]
        x = tl.load(ptr + start + k, inside & (k < N), 0.0).to(tl.float32)
    return x


@triton.jit
def write(ptr, start, inside, x, N: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    if TURNS:
        k = tl.arange(0, BLOCK // 2)[None, :]
        mask = inside & (k < N // 2)
        first, second = tl.split(tl.reshape(x, (x.shape[0], BLOCK // 2, 2)))
        tl.store(ptr + start + k, first, mask)
        tl.store(ptr + start + N // 2 + k, second, mask)
    else:
        k = tl.arange(0, BLOCK)[None, :]
        tl.store(ptr + start + k, x, inside & (k < N))


@triton.jit
def activation(g, ACT: tl.constexpr):
    """act(g) and its derivative; 1 - sigmoid is computed as such."""
    e = tl.exp(-tl.abs(g))
    s, rest = tl.where(g < 0, e, 1.0) / (1 + e), tl.where(g < 0, 1.0, e) / (1 + e)
    if ACT == "silu":
        a, slope = g * s, s * (1 + g * rest)
    elif ACT == "sigmoid":
        a, slope = s, s * rest
    else:
        a, slope = g, tl.full(g.shape, 1.0, tl.float32)
    return a, slope


@triton.jit
def standard(u, inside, eps, N: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr):
    """z and 1 / s, which outside is 1: there an eps of 0 would make it infinite."""
    if CENTRED:
        mean = tl.sum(u, 1, keep_dims=True) / N
        u = tl.where(tl.arange(0, BLOCK)[None, :] < N, u - mean, 0.0)
    scale = 1 / tl.sqrt(tl.where(inside, tl.sum(u * u, 1, keep_dims=True) / N + eps, 1.0))
    return u * scale, scale


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    h_ptr, g_ptr, weight_ptr, bias_ptr, y_ptr, rows, h_stride, g_stride, eps,
    N: tl.constexpr, CENTRED: tl.constexpr, ACT: tl.constexpr, POST: tl.constexpr, TURNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    x = read(h_ptr, row * h_stride, inside, N, BLOCK, False)
    if g_ptr is not None:
        a, _ = activation(read(g_ptr, row * g_stride, inside, N, BLOCK, TURNS), ACT)
        if POST:
            x *= a
    x, _ = standard(x, inside, eps, N, BLOCK, CENTRED)
    always = tl.full((1, 1), 1, tl.int1)
    if weight_ptr is not None:
        x *= read(weight_ptr, 0, always, N, BLOCK, TURNS)
    if bias_ptr is not None:
        x += read(bias_ptr, 0, always, N, BLOCK, TURNS)
    if g_ptr is not None and not POST:
        x *= a
    write(y_ptr, row * N, inside, x, N, BLOCK, TURNS)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, h_ptr, g_ptr, weight_ptr, bias_ptr, dh_ptr, dg_ptr, d_weight_ptr, d_bias_ptr,
    rows, dy_stride, h_stride, g_stride, eps,
    N: tl.constexpr, CENTRED: tl.constexpr, ACT: tl.constexpr, POST: tl.constexpr, TURNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    always = tl.full((1, 1), 1, tl.int1)
    if weight_ptr is not None:
        weight = read(weight_ptr, 0, always, N, BLOCK, TURNS)
        d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    if bias_ptr is not None:
        bias = read(bias_ptr, 0, always, N, BLOCK, TURNS)
        d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        h = read(h_ptr, row * h_stride, inside, N, BLOCK, False)
        d = read(dy_ptr, row * dy_stride, inside, N, BLOCK, TURNS)
        u = h
        if g_ptr is not None:
            a, slope = activation(read(g_ptr, row * g_stride, inside, N, BLOCK, TURNS), ACT)
            if POST:
                u = h * a
        z, scale = standard(u, inside, eps, N, BLOCK, CENTRED)
        if g_ptr is not None and not POST:
            n = z
            if weight_ptr is not None:
                n *= weight
            if bias_ptr is not None:
                n += bias
            write(dg_ptr, row * N, inside, d * n * slope, N, BLOCK, TURNS)
            d *= a
        if bias_ptr is not None:
            d_bias += d
        if weight_ptr is not None:
            d_weight += d * z
            d *= weight
        inner = d - z * (tl.sum(d * z, 1, keep_dims=True) / N)
        if CENTRED:
            inner -= tl.sum(d, 1, keep_dims=True) / N
        d = inner * scale
        if g_ptr is not None and POST:
            write(dg_ptr, row * N, inside, d * h * slope, N, BLOCK, TURNS)
            d *= a
        write(dh_ptr, row * N, inside, d, N, BLOCK, False)
    place = program * N
    if weight_ptr is not None:
        write(d_weight_ptr, place, always, tl.sum(d_weight, 0, keep_dims=True), N, BLOCK, TURNS)
    if bias_ptr is not None:
        write(d_bias_ptr, place, always, tl.sum(d_bias, 0, keep_dims=True), N, BLOCK, TURNS)
