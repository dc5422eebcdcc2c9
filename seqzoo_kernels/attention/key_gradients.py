"""The Triton kernel of attention's backward pass for keys and values: a block of keys to a program.

Equations in gradients.py.
"""

import triton
import triton.language as tl

from .kernels import LOG2E, VARYING, load_rows


@triton.jit
def scores_after(
    k, q, at, tile, scale, shift, own, between, inner_ptr, total_ptr,
    BI: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [keys, queries] with the tile of queries at `at`, after the block, with all decays and `shift` of each query;
    `between` with the tile's."""
    x = tl.dot(k, q.T, input_precision=PRECISION) * scale
    if HAS_DECAY:
        shift += tl.load(inner_ptr + at + tile)
        own += between.to(tl.float32)
        between += tl.load(total_ptr + at // BI)
    if HAS_SUMS:
        x += own[:, None]
    return x + shift[None, :], between


@triton.jit
def add_key(x, q, do, v, delta, dk, dv, sums, HAS_SUMS: tl.constexpr, PRECISION: tl.constexpr):
    """What a tile of queries adds to dk, dv and the column sums of dS; x [keys, queries] less lse."""
    weights = tl.exp2(x)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
    d_scores = weights * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])
    if HAS_SUMS:
        sums += tl.sum(d_scores, 1)
    return tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION), dv, sums


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    added_ptr,
    first_ptr,
    position_ptr,
    high_ptr,
    low_ptr,
    closed_ptr,
    own_ptr,
    inner_ptr,
    total_ptr,
    stop_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    columns_ptr,
    T,
    older,
    window,
    blocks,
    padded,
    scale,
    factor,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OLDER: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRUNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk, dv and the column sums of dS: of the slots of the cache with OLDER, else of the keys of this pass.

    lse, delta and the decay's arrays have `padded` entries a head, a multiple of BO. All query heads that read the key head are
    gone through in turn.
    """
    pid = tl.program_id(0)
    block, row = pid % blocks, (pid // blocks).to(tl.int64)
    G: tl.constexpr = H // R
    b, g = row // G, row % G
    added, first = tl.load(added_ptr + b), tl.load(first_ptr + b)
    place, tile = tl.arange(0, BO), tl.arange(0, BI)
    j0 = block * BO
    j = j0 + place
    if OLDER:
        position = tl.load(position_ptr + b * (older + T) + j, mask=j < older, other=-1)
        live, end = position >= 0, older
        slot0 = tl.cast(j0, tl.int64)
    else:
        live, end = j < added, T
        slot0 = (older + j0).to(tl.int64)
    k = load_rows(k_ptr + b * k_b + g * k_h + slot0 * k_t, k_t, place, live, K, BK, True)
    v = load_rows(v_ptr + b * v_b + g * v_h + slot0 * v_t, v_t, place, live, V, BV, True)
    dk, dv = tl.zeros([BO, BK], tl.float32), tl.zeros([BO, BV], tl.float32)
    HAS_SUMS: tl.constexpr = HAS_DECAY or HAS_BIAS

    for r in range(R):
        h = g * R + r
        head = b * H + h
        q_head, do_head = q_ptr + b * q_b + h * q_h, do_ptr + b * do_b + h * do_h
        at_head = head * (padded // BO * BO)  # the compiler sees how it is aligned
        sums = tl.zeros([BO], tl.float32)
        between = tl.zeros([], tl.float64)
        begin = 0
        own = sums
        if OLDER:
            if HAS_BIAS:
                bias = tl.load(bias_ptr + (b * (older + T) + j) * H + h, mask=j < older, other=0.0)
                own = bias.to(tl.float32) * LOG2E
        else:
            begin = j0 + BO
            high, low, closed = own, own, own
            if HAS_DECAY:
                own, high = tl.load(own_ptr + at_head + j), tl.load(high_ptr + at_head + j)
                low, closed = tl.load(low_ptr + at_head + j), tl.load(closed_ptr + at_head + j)
            stop = tl.where(j0 < added, BO // BI, 0)
            for n in range(stop):  # the block itself
                i0 = j0 + n * BI
                i = i0 + tile
                q = load_rows(q_head + tl.cast(i0, tl.int64) * q_t, q_t, tile, i < added, K, BK, True)
                do = load_rows(do_head + tl.cast(i0, tl.int64) * do_t, do_t, tile, i < added, V, BV, True)
                lse, delta = tl.load(lse_ptr + at_head + i), tl.load(delta_ptr + at_head + i)
                x = tl.dot(k, q.T, input_precision=PRECISION) * scale
                see = j[:, None] <= i[None, :]
                if HAS_WINDOW:
                    see = see & (i[None, :] - j[:, None] < window)
                if HAS_DECAY:
                    at = at_head + i
                    x += (tl.load(high_ptr + at)[None, :] - high[:, None]) + (
                        tl.load(low_ptr + at)[None, :] - low[:, None]
                    )
                    see = see & (tl.load(closed_ptr + at)[None, :] == closed[:, None])
                x = tl.where(see, x - lse[None, :], float("-inf"))
                dk, dv, sums = add_key(x, q, do, v, delta, dk, dv, sums, HAS_SUMS, PRECISION)

        # tiles from `begin` on: those before `full` every key of the block is seen by whole, those before `last` in part
        last = (added - begin + BI - 1) // BI
        full = tl.minimum(last, (added - begin) // BI)
        if PRUNED:
            last = tl.minimum(last, tl.load(stop_ptr + head * blocks + block))
        if HAS_WINDOW and not OLDER:
            last = tl.minimum(last, (j0 + BO + window - 1 - begin + BI - 1) // BI)
            full = tl.minimum(full, tl.maximum(j0 + window - begin, 0) // BI)
        if OLDER:
            full = 0
            if HAS_WINDOW:
                last = tl.minimum(last, (window + BI - 1) // BI)
        full = tl.maximum(tl.minimum(full, last), 0)
        if not OLDER:
            for n in range(full):
                i0 = begin + n * BI
                i = i0 + tile
                q = load_rows(q_head + tl.cast(i0, tl.int64) * q_t, q_t, tile, tile, K, BK, False)
                do = load_rows(do_head + tl.cast(i0, tl.int64) * do_t, do_t, tile, tile, V, BV, False)
                shift, delta = -tl.load(lse_ptr + at_head + i), tl.load(delta_ptr + at_head + i)
                x, between = scores_after(
                    k, q, at_head + i0, tile, scale, shift, own, between, inner_ptr, total_ptr,
                    BI, HAS_DECAY, HAS_SUMS, PRECISION,
                )  # fmt: skip
                dk, dv, sums = add_key(x, q, do, v, delta, dk, dv, sums, HAS_SUMS, PRECISION)
        for n in range(full, last):
            i0 = begin + n * BI
            i = i0 + tile
            q = load_rows(q_head + tl.cast(i0, tl.int64) * q_t, q_t, tile, i < added, K, BK, True)
            do = load_rows(do_head + tl.cast(i0, tl.int64) * do_t, do_t, tile, i < added, V, BV, True)
            shift, delta = -tl.load(lse_ptr + at_head + i), tl.load(delta_ptr + at_head + i)
            x, between = scores_after(
                k, q, at_head + i0, tile, scale, shift, own, between, inner_ptr, total_ptr,
                BI, HAS_DECAY, HAS_SUMS, PRECISION,
            )  # fmt: skip
            see = live[:, None]
            if HAS_WINDOW and OLDER:
                see = see & ((first + i)[None, :] - position[:, None] < window)
            elif HAS_WINDOW:
                see = see & (i[None, :] - j[:, None] < window)
            x = tl.where(see, x, float("-inf"))
            dk, dv, sums = add_key(x, q, do, v, delta, dk, dv, sums, HAS_SUMS, PRECISION)
        if HAS_SUMS:
            at = columns_ptr + head * (older + T) + slot0 + place
            tl.store(at, sums, mask=j < end)

    column = tl.arange(0, BK)
    at = dk_ptr + ((b * (older + T) + slot0) * G + g) * K + place[:, None] * (G * K) + column[None, :]
    tl.store(at, (dk * factor).to(dk_ptr.dtype.element_ty), mask=(j < end)[:, None] & (column < K)[None, :])
    column = tl.arange(0, BV)
    at = dv_ptr + ((b * (older + T) + slot0) * G + g) * V + place[:, None] * (G * V) + column[None, :]
    tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=(j < end)[:, None] & (column < V)[None, :])
