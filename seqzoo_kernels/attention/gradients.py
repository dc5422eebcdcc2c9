"""The Triton kernels of attention's backward pass: a block of queries to a program for dq; key_gradients.py has dk and dv.

    P = 2^{x - lse},   dS = P * (do v^T - rowsum(do * o)),   dq = scale dS k,   dk = scale dS^T q,   dv = P^T do

Decays as in kernels.py. A gate's gradient is the sum of dS over pairs on its two sides: of the rows of dS from it on minus the
columns from it on, for which the sums of rows and of columns are written too. (Rows sum to 0 but for rounding; with both at
hand the rounding of pairs on one side falls out.) Nothing is added up by several programs: runs agree in every bit.
"""

import triton
import triton.language as tl

from .kernels import (
    VARYING,
    bounds,
    load_keys,
    load_rows,
    older_seen,
    scores_before,
    scores_in_block,
    scores_of_cache,
)


@triton.jit(do_not_specialize=["T", "blocks"])
def product_kernel(
    out_ptr,
    do_ptr,
    added_ptr,
    lse_ptr,
    padded_lse_ptr,
    delta_ptr,
    T,
    blocks,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BO: tl.constexpr,
):
    """Of each query lse and delta = rowsum(do * o), both [B * H, blocks * BO]: +inf and 0 of those that are not there."""
    pid = tl.program_id(0)
    block, row = pid % blocks, (pid // blocks).to(tl.int64)
    b, h = row // H, row % H
    i0 = block * BO
    place = tl.arange(0, BO)
    below = i0 + place < tl.load(added_ptr + b)
    out = load_rows(out_ptr + ((b * T + i0) * H + h) * V, H * V, place, below, V, BV, True)
    do = load_rows(
        do_ptr + b * do_b + h * do_h + tl.cast(i0, tl.int64) * do_t, do_t, place, below, V, BV, True
    )
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(lse_ptr + row * T + i0 + place, mask=below, other=float("inf"))
    at = row * blocks * BO + i0 + place
    tl.store(padded_lse_ptr + at, lse)
    tl.store(delta_ptr + at, delta)


@triton.jit
def add_query(x, shift, do, v, k, delta, dq, sums, HAS_DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """What a tile of keys adds to dq and to the row sums of dS; `shift` is added to each row of x."""
    weights = tl.exp2(x + shift[:, None])
    d_scores = weights * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
    if HAS_DECAY:
        sums += tl.sum(d_scores, 1)
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION), sums


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
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
    start_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    rows_ptr,
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
    HAS_OLDER: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRUNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, and the row sums of dS. lse and delta have `padded` entries a head."""
    pid = tl.program_id(0)
    block, row = blocks - 1 - pid % blocks, (pid // blocks).to(tl.int64)
    b, h = row // H, row % H
    k_ptr += b * k_b + h // R * k_h
    v_ptr += b * v_b + h // R * v_h
    new_k, new_v = k_ptr + tl.cast(older, tl.int64) * k_t, v_ptr + tl.cast(older, tl.int64) * v_t
    added = tl.load(added_ptr + b)
    i0 = block * BO
    place, tile = tl.arange(0, BO), tl.arange(0, BI)
    i = i0 + place
    alive = i < added
    q = load_rows(q_ptr + b * q_b + h * q_h + tl.cast(i0, tl.int64) * q_t, q_t, place, alive, K, BK, True)
    do = load_rows(
        do_ptr + b * do_b + h * do_h + tl.cast(i0, tl.int64) * do_t, do_t, place, alive, V, BV, True
    )
    lse = tl.load(lse_ptr + row * padded + i, mask=alive, other=float("inf"))
    delta = tl.load(delta_ptr + row * padded + i, mask=alive, other=0.0)
    dq = tl.zeros([BO, BK], tl.float32)
    sums = tl.zeros([BO], tl.float32)
    shift, high, low, closed, first_tile = -lse, sums, sums, sums, 0
    decay = row * blocks * BO
    if HAS_DECAY:
        at = decay + i
        shift, high, low = tl.load(own_ptr + at) - lse, tl.load(high_ptr + at), tl.load(low_ptr + at)
        closed = tl.load(closed_ptr + at)
    if PRUNED:
        first_tile = tl.load(start_ptr + row * blocks + block)
    whole, some = bounds(i0, window, first_tile, BO, BI, HAS_WINDOW, PRUNED)
    whole, some = tl.where(i0 < added, whole, 0), tl.where(i0 < added, some, 0)

    for n in range(BO // BI):  # the block itself
        j0 = i0 + BO - BI - n * BI
        j = j0 + tile
        k, v = load_keys(new_k, new_v, k_t, v_t, j0, tile, j < added, K, V, BK, BV, True)
        x = scores_in_block(
            q, k, i, j, window, scale, high, low, closed, decay + j, high_ptr, low_ptr, closed_ptr,
            HAS_DECAY, HAS_WINDOW, PRECISION,
        )  # fmt: skip
        dq, sums = add_query(x, -lse, do, v, k, delta, dq, sums, HAS_DECAY, PRECISION)

    between = tl.zeros([], tl.float64)
    for n in range(whole):  # what all see
        j0 = i0 - BI - n * BI
        k, v = load_keys(new_k, new_v, k_t, v_t, j0, tile, tile, K, V, BK, BV, False)
        x, after, between = scores_before(
            q, k, j0, tile, scale, shift, decay, between, inner_ptr, total_ptr, BI, HAS_DECAY, PRECISION
        )
        dq, sums = add_query(x, after, do, v, k, delta, dq, sums, HAS_DECAY, PRECISION)

    if HAS_WINDOW:
        for n in range(whole, some):  # what the window cuts
            j0 = i0 - BI - n * BI
            k, v = load_keys(new_k, new_v, k_t, v_t, j0, tile, tile, K, V, BK, BV, False)
            x, after, between = scores_before(
                q, k, j0, tile, scale, shift, decay, between, inner_ptr, total_ptr, BI, HAS_DECAY, PRECISION
            )
            x = tl.where(i[:, None] - (j0 + tile)[None, :] < window, x, float("-inf"))
            dq, sums = add_query(x, after, do, v, k, delta, dq, sums, HAS_DECAY, PRECISION)

    if HAS_OLDER:
        first = tl.load(first_ptr + b)
        slots = older_seen(i0, older, window, first_tile, HAS_WINDOW, PRUNED)
        slots = tl.where(i0 < added, slots, 0)
        after = shift + between.to(tl.float32)
        for j0 in range(0, slots, BI):  # the cache
            j = j0 + tile
            position = tl.load(position_ptr + b * (older + T) + j, mask=j < older, other=-1)
            k, v = load_keys(k_ptr, v_ptr, k_t, v_t, j0, tile, position >= 0, K, V, BK, BV, True)
            x = scores_of_cache(
                q, k, i, j, position, first, window, scale, bias_ptr, older + T, older, b, h,
                H, HAS_BIAS, HAS_WINDOW, PRECISION,
            )  # fmt: skip
            dq, sums = add_query(x, after, do, v, k, delta, dq, sums, HAS_DECAY, PRECISION)

    column = tl.arange(0, BK)
    at = dq_ptr + ((b * T + i0) * H + h) * K + place[:, None] * (H * K) + column[None, :]
    tl.store(at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=(i < T)[:, None] & (column < K)[None, :])
    if HAS_DECAY:
        tl.store(rows_ptr + row * T + i, sums, mask=i < T)
