"""The Triton kernels of gated_linear_attention: chunks of C tokens, their states first, then all chunks side by side.

    states     S before each chunk, one after another       S' = e^{P_C} S + (k e^X)^T v
    outputs    o = scale ((q e^P) S + A v)                   A_ij = sum_k q_ik k_jk e^{gates j+1 .. i}, j <= i

P are sums of gates up to a token and with it, X behind it, both within the chunk. States are added up in float32; those in
between are kept in the inputs' dtype, in which they are multiplied. A tile has BK key and BV value channels; wider heads
loop over tiles. The kernels of the backward pass are in gradients.py.
"""

import triton
import triton.language as tl

from ..linear_scan.lookback import decay_of, step
from .tiles import (
    CHANNEL,
    CONSTANT,
    HEAD,
    NONE,
    add_scores,
    causal_scores,
    left_to_other,
    load_gates,
    load_sums,
    load_tile,
    passed,
    place_of,
    prefix,
    product,
    suffix,
    tile,
)


@triton.jit
def span(n, chunks_of_ptr, T, parts, C: tl.constexpr, PACKED: tl.constexpr):
    """The chunks of sequence n, or of part n of the rows, each cut into as many parts: first, count."""
    if PACKED:
        first = tl.load(chunks_of_ptr + n)
        return first, tl.load(chunks_of_ptr + n + 1) - first
    else:
        each = (T + C - 1) // C
        part = (each + parts - 1) // parts
        begin = tl.minimum(n % parts * part, each)
        return n // parts * each + begin, tl.minimum(part, each - begin)


@triton.jit
def block(ptr, c, G, group, K, V, k, v):
    """Pointers to [BK, BV] of chunk (or row) c's state."""
    return ptr + (c.to(tl.int64) * G + group) * (K * V) + (k[:, None] * V + v[None, :])


@triton.jit(do_not_specialize=["T", "chunks", "parts"])
def states_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    initial_ptr,
    chunks_ptr,
    chunks_of_ptr,
    states_ptr,
    final_ptr,
    sums_ptr,
    T,
    chunks,
    parts,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    ENDS: tl.constexpr,
    EXACT: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ENDS: only the state at the end of each part of a row, from a state of 0, and in sums_ptr its gates' sums."""
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    blocks: tl.constexpr = (V + BV - 1) // BV
    kk = (tl.program_id(1) // blocks) * BK + tl.arange(0, BK)
    vv = (tl.program_id(1) % blocks) * BV + tl.arange(0, BV)
    inside = (kk[:, None] < K) & (vv[None, :] < V)
    i, j = tl.arange(0, C), tl.arange(0, C)
    gate_row: tl.constexpr = G * K if GATE == CHANNEL else G
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_STATE:
        S = tl.load(block(initial_ptr, row, G, group, K, V, kk, vv), mask=inside, other=0.0)
    first_chunk, count = span(row, chunks_of_ptr, T, parts, C, PACKED)
    all_gates = tl.zeros([BK], tl.float32)
    for m in range(count):
        c = first_chunk + m
        first, n = place_of(c, chunks_ptr, T, chunks, C, PACKED)
        if not ENDS:
            tl.store(block(states_ptr, c, G, group, K, V, kk, vv), S, mask=inside)
        k = load_tile(k_ptr, first, n, G * K, group, K, i, kk).to(tl.float32)
        v = load_tile(v_ptr, first, n, G * V, group, V, i, vv)
        if GATE != NONE:
            g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
            k = k * tl.exp(suffix(g, i, j, GATE, EXACT))
            total = tl.sum(g, 0)
            S = passed(S, total[:, None], EXACT)
            if ENDS:
                all_gates += total
            elif GATE == CHANNEL:
                half = tl.sum(tl.where(i[:, None] < C // 2, g, 0.0), 0)
                place = sums_ptr + (c.to(tl.int64) * G + group) * K + kk
                tl.store(place, half, mask=kk < K)
                tl.store(place + tl.cast(chunks, tl.int64) * (G * K), total, mask=kk < K)
        S = product(tl.trans(k), v, S, OPERAND, PRECISION)
    tl.store(block(final_ptr, row, G, group, K, V, kk, vv), S, mask=inside)
    if ENDS:
        tl.store(sums_ptr + (row.to(tl.int64) * G + group) * K + kk, all_gates, mask=kk < K)


@triton.jit(do_not_specialize=["T", "chunks"])
def outputs_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    states_ptr,
    chunks_ptr,
    sums_ptr,
    out_ptr,
    T,
    chunks,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATE: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
    MIXED: tl.constexpr,
    LEVELS: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    c, head = tl.program_id(0) // H, tl.program_id(0) % H
    group = head // (H // G)
    if MIXED > 0:  # noqa: SIM102 (known when compiled, the other one is not)
        if left_to_other(sums_ptr, c, chunks, group, G, K, MIXED, LEVELS > 0):
            return
    first, n = place_of(c, chunks_ptr, T, chunks, C, PACKED)
    i, j = tl.arange(0, C), tl.arange(0, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    gate_row: tl.constexpr = G * K if GATE == CHANNEL else G
    o = tl.zeros([C, BV], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for start in tl.static_range(0, K, BK):
        kk = start + tl.arange(0, BK)
        q = load_tile(q_ptr, first, n, H * K, head, K, i, kk)
        k = load_tile(k_ptr, first, n, G * K, group, K, i, kk)
        inside = (kk[:, None] < K) & (vv[None, :] < V)
        S = tl.load(block(states_ptr, c, G, group, K, V, kk, vv), mask=inside, other=0.0)
        if GATE == CHANNEL or start == 0:
            g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
        if GATE != CHANNEL:
            o = product(q, S, o, OPERAND, PRECISION)
        else:
            P = prefix(g, i, j, GATE, EXACT)
            if LEVELS == 0:
                half, _ = load_sums(sums_ptr, c, chunks, group, G, K, kk)
                q = (q * tl.exp(P - half[None, :])).to(OPERAND)
                k = k * tl.exp(half[None, :] - P)
                o = product(q, S * tl.exp(half)[:, None], o, OPERAND, PRECISION)
            else:
                o = product(q * tl.exp(P), S, o, OPERAND, PRECISION)
        A = add_scores(A, q, k, g, i, j, GATE, LEVELS, EXACT, OPERAND, PRECISION)
    A = causal_scores(A, g, i, j, GATE)
    if GATE == HEAD or GATE == CONSTANT:  # noqa: SIM109 (kernels have no "in")
        o = o * tl.exp(prefix(g, i, j, GATE, EXACT))
    v = load_tile(v_ptr, first, n, G * V, group, V, i, vv)
    o = scale * product(A, v, o, OPERAND, PRECISION)
    tl.store(tile(out_ptr, first, H * V, head, V, i, vv), o, mask=(i[:, None] < n) & (vv[None, :] < V))


@triton.jit(do_not_specialize=["T"])
def recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    initial_ptr,
    cu_ptr,
    out_ptr,
    final_ptr,
    T,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    EXACT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Token after token, the state in registers: a decoder's step in one launch."""
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (kk[:, None] < K) & (vv[None, :] < V)
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_STATE:
        S = tl.load(block(initial_ptr, row, G, group, K, V, kk, vv), mask=inside, other=0.0)
    if PACKED:
        token = tl.load(cu_ptr + row).to(tl.int64)
        steps = (tl.load(cu_ptr + row + 1) - token).to(tl.int32)
    else:
        token = row.to(tl.int64) * T
        steps = T
    for _ in range(steps):
        k = tl.load(k_ptr + (token * G + group) * K + kk, mask=kk < K, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + (token * G + group) * V + vv, mask=vv < V, other=0.0).to(tl.float32)
        new = k[:, None] * v[None, :]
        if GATE == NONE:
            S = S + new
        else:
            if GATE == CHANNEL:
                g = tl.load(g_ptr + (token * G + group) * K + kk, mask=kk < K, other=0.0).to(tl.float32)[
                    :, None
                ]
            elif GATE == CONSTANT:
                g = tl.load(g_ptr + group).to(tl.float32) + tl.zeros([1, 1], tl.float32)
            else:
                g = tl.load(g_ptr + token * G + group).to(tl.float32) + tl.zeros([1, 1], tl.float32)
            decay, rest = decay_of(g, EXACT)
            S = step(decay, rest, S, new, EXACT)
        for r in tl.static_range(H // G):
            head = group * (H // G) + r
            q = tl.load(q_ptr + (token * H + head) * K + kk, mask=kk < K, other=0.0).to(tl.float32) * scale
            tl.store(out_ptr + (token * H + head) * V + vv, tl.sum(q[:, None] * S, 0), mask=vv < V)
        token += 1
    tl.store(block(final_ptr, row, G, group, K, V, kk, vv), S, mask=inside)
