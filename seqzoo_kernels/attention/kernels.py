"""The Triton kernels of attention's forward pass, flash-style, with the decay of each key between it and the query.

    o_i = sum_j 2^{x_ij - m_i} v_j / sum_j 2^{x_ij - m_i},   x_ij = log2(e) (scale q_i . k_j + g_{j+1} + ... + g_i)

A program has a block of BO queries of a head and goes through the keys in tiles of BI, from the block itself back to the first,
so that each query meets its own key at once and no maximum is ever -inf. Every decay is a sum of the gates in between, never a
difference of sums over the whole sequence: between blocks it is

    own_i (block's start to i)  +  the totals of the tiles in between, in float64  +  inner_j (after j to the end of j's tile)

and within the block c_i - c_j, with c in two float32 and a count of the gates of -inf. All of them are <= 0, in units of log 2.
The backward pass for keys swaps the parts: blocks of BO keys, tiles of BI queries.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# of a gate within a block: so few orders above the float32 error that c keeps small gates
LOWEST = tl.constexpr(-1.0e7)
VARYING = ["T", "older", "window", "blocks", "padded"]  # not worth a compilation each


@triton.jit(do_not_specialize=["T", "blocks"])
def decay_kernel(
    g_ptr,
    high_ptr,
    low_ptr,
    closed_ptr,
    own_ptr,
    inner_ptr,
    total_ptr,
    T,
    blocks,
    g_b,
    g_t,
    g_h,
    H: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Of a block: c as high + low, the count of closed gates, and the sums up to and after each token.

    QUERIES: the blocks are of queries and the tiles of keys, else the reverse.
    """
    pid = tl.program_id(0)
    block, row = pid % blocks, (pid // blocks).to(tl.int64)
    g_ptr += row // H * g_b + row % H * g_h
    place = tl.arange(0, BO)
    t = block * BO + place
    g = tl.load(g_ptr + t.to(tl.int64) * g_t, mask=t < T, other=0.0).to(tl.float64) * LOG2E
    c = tl.cumsum(tl.maximum(g, LOWEST), 0)
    high = c.to(tl.float32)
    at = row * blocks * BO + t
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, (c - high.to(tl.float64)).to(tl.float32))
    tl.store(closed_ptr + at, tl.cumsum((g == float("-inf")).to(tl.int32), 0))
    s = block * BO + tl.arange(0, BO // BI)[:, None] * BI + tl.arange(0, BI)[None, :]
    inside = tl.load(g_ptr + s.to(tl.int64) * g_t, mask=s < T, other=0.0).to(tl.float64) * LOG2E
    tiles = tl.arange(0, BO // BI)
    tl.store(total_ptr + (row * blocks + block) * (BO // BI) + tiles, tl.sum(inside, 1))
    if QUERIES:
        own = tl.cumsum(g, 0)
        more = (s + 1 < T) & (tl.arange(0, BI)[None, :] + 1 < BI)
        later = tl.load(g_ptr + (s + 1).to(tl.int64) * g_t, mask=more, other=0.0).to(tl.float64) * LOG2E
        inner = tl.cumsum(later, 1, reverse=True)
    else:
        more = (t + 1 < T) & (place + 1 < BO)
        later = tl.load(g_ptr + (t + 1).to(tl.int64) * g_t, mask=more, other=0.0).to(tl.float64) * LOG2E
        own = tl.cumsum(later, 0, reverse=True)
        inner = tl.cumsum(inside, 1)
    tl.store(own_ptr + at, own.to(tl.float32))
    tl.store(inner_ptr + row * blocks * BO + s, inner.to(tl.float32))


@triton.jit
def load_rows(ptr, step, place, below, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK] of a tensor with WIDTH columns; 0 beyond, and with MASKED in rows that are not `below`."""
    column = tl.arange(0, BLOCK)
    at = ptr + place[:, None] * step + column[None, :]
    if MASKED and BLOCK != WIDTH:
        return tl.load(at, mask=below[:, None] & (column < WIDTH)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=below[:, None], other=0.0)
    if BLOCK != WIDTH:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def bounds(
    i0, window, first_tile, BO: tl.constexpr, BI: tl.constexpr, HAS_WINDOW: tl.constexpr, PRUNED: tl.constexpr
):
    """Tiles before the block of queries at i0: how many of them all queries see whole, and how many any query sees."""
    whole, some = i0 // BI, i0 // BI
    if HAS_WINDOW:
        some -= tl.maximum(i0 - window + 1, 0) // BI
        whole -= tl.minimum((tl.maximum(i0 + BO - window, 0) + BI - 1) // BI, whole)
    if PRUNED:
        some = tl.minimum(some, i0 // BI - first_tile)
        whole = tl.minimum(whole, some)
    return whole, some


@triton.jit
def older_seen(i0, older, window, first_tile, HAS_WINDOW: tl.constexpr, PRUNED: tl.constexpr):
    """How many slots of the cache the block of queries at i0 must go through."""
    if HAS_WINDOW:
        older = tl.where(i0 >= window, 0, older)
    if PRUNED:
        older = tl.where(first_tile > 0, 0, older)
    return older


@triton.jit
def load_keys(
    k_ptr, v_ptr, k_t, v_t, j0, tile, below,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The tile of keys and values from j0 on."""
    k = load_rows(k_ptr + tl.cast(j0, tl.int64) * k_t, k_t, tile, below, K, BK, MASKED)
    v = load_rows(v_ptr + tl.cast(j0, tl.int64) * v_t, v_t, tile, below, V, BV, MASKED)
    return k, v


@triton.jit
def scores_in_block(
    q, k, i, j, window, scale, high_i, low_i, closed_i, decay_at, high_ptr, low_ptr, closed_ptr,
    HAS_DECAY: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [queries, keys] within a block with decay and mask; `decay_at` of the keys."""
    x = tl.dot(q, k.T, input_precision=PRECISION) * scale
    see = j[None, :] <= i[:, None]
    if HAS_WINDOW:
        see = see & (i[:, None] - j[None, :] < window)
    if HAS_DECAY:
        high, low = tl.load(high_ptr + decay_at), tl.load(low_ptr + decay_at)
        x += (high_i[:, None] - high[None, :]) + (low_i[:, None] - low[None, :])
        see = see & (closed_i[:, None] == tl.load(closed_ptr + decay_at)[None, :])
    return tl.where(see, x, float("-inf"))


@triton.jit
def scores_before(
    q, k, j0, tile, scale, own, decay, between, inner_ptr, total_ptr,
    BI: tl.constexpr, HAS_DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores with the tile of keys at j0, before the block, with the decay to the tile's end alone; `own` with that from there
    to the block; `between` with the tile's."""
    x = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if HAS_DECAY:
        x += tl.load(inner_ptr + decay + j0 + tile)[None, :]
        own += between.to(tl.float32)
        between += tl.load(total_ptr + decay // BI + j0 // BI)
    return x, own, between


@triton.jit
def scores_of_cache(
    q, k, i, j, position, first, window, scale, bias_ptr, slots, older, b, h,
    H: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores with a tile of the cache's `slots`, which begin with `older` old ones, without the decay of what is new."""
    x = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + (b * slots + j) * H + h, mask=j < older, other=0.0)
        x += (bias * LOG2E)[None, :]
    see = (position >= 0)[None, :]
    if HAS_WINDOW:
        see = see & ((first + i)[:, None] - position[None, :] < window)
    return tl.where(see, x, float("-inf"))


@triton.jit
def attend(x, own, v, m, total, acc, SAFE: tl.constexpr, PRECISION: tl.constexpr):
    """A step of the online softmax; `own` is added to each row of x. SAFE where a row may have seen nothing yet."""
    highest = tl.maximum(m, tl.max(x, 1) + own)
    base = highest
    if SAFE:
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(x - (base - own)[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return highest, total, acc


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
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
    out_ptr,
    lse_ptr,
    T,
    older,
    window,
    blocks,
    scale,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
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
    q_block = q_ptr + b * q_b + h * q_h + tl.cast(i0, tl.int64) * q_t
    q = load_rows(q_block, q_t, place, i < added, K, BK, True)
    m = tl.full([BO], float("-inf"), tl.float32)
    total = tl.zeros([BO], tl.float32)
    acc = tl.zeros([BO, BV], tl.float32)
    none = tl.zeros([BO], tl.float32)
    own, high, low, closed, first_tile = none, none, none, none, 0
    decay = row * blocks * BO
    if HAS_DECAY:
        at = decay + i
        own, high, low = tl.load(own_ptr + at), tl.load(high_ptr + at), tl.load(low_ptr + at)
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
        m, total, acc = attend(x, none, v, m, total, acc, True, PRECISION)

    between = tl.zeros([], tl.float64)
    for n in range(whole):  # what all see
        j0 = i0 - BI - n * BI
        k, v = load_keys(new_k, new_v, k_t, v_t, j0, tile, tile, K, V, BK, BV, False)
        x, after, between = scores_before(
            q, k, j0, tile, scale, own, decay, between, inner_ptr, total_ptr, BI, HAS_DECAY, PRECISION
        )
        m, total, acc = attend(x, after, v, m, total, acc, False, PRECISION)

    if HAS_WINDOW:
        for n in range(whole, some):  # what the window cuts
            j0 = i0 - BI - n * BI
            k, v = load_keys(new_k, new_v, k_t, v_t, j0, tile, tile, K, V, BK, BV, False)
            x, after, between = scores_before(
                q, k, j0, tile, scale, own, decay, between, inner_ptr, total_ptr, BI, HAS_DECAY, PRECISION
            )
            x = tl.where(i[:, None] - (j0 + tile)[None, :] < window, x, float("-inf"))
            m, total, acc = attend(x, after, v, m, total, acc, True, PRECISION)

    if HAS_OLDER:
        first = tl.load(first_ptr + b)
        slots = older_seen(i0, older, window, first_tile, HAS_WINDOW, PRUNED)
        slots = tl.where(i0 < added, slots, 0)
        after = own + between.to(tl.float32)
        for j0 in range(0, slots, BI):  # the cache
            j = j0 + tile
            position = tl.load(position_ptr + b * (older + T) + j, mask=j < older, other=-1)
            k, v = load_keys(k_ptr, v_ptr, k_t, v_t, j0, tile, position >= 0, K, V, BK, BV, True)
            x = scores_of_cache(
                q, k, i, j, position, first, window, scale, bias_ptr, older + T, older, b, h,
                H, HAS_BIAS, HAS_WINDOW, PRECISION,
            )  # fmt: skip
            m, total, acc = attend(x, after, v, m, total, acc, True, PRECISION)

    alive = i < added
    total = tl.where(total > 0, total, 1.0)
    out = tl.where(alive[:, None], acc / total[:, None], 0.0)
    column = tl.arange(0, BV)
    out_at = out_ptr + ((b * T + i0) * H + h) * V + place[:, None] * (H * V) + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(i < T)[:, None] & (column < V)[None, :])
    # of a query that sees nothing +inf, so that backward gives each of its weights 0
    tl.store(lse_ptr + row * T + i, tl.where(alive, m + tl.log2(total), float("inf")), mask=i < T)
