"""The Triton kernels of gated_linear_attention's backward pass; states, outputs and names as in kernels.py.

    d_states   dS behind each chunk, last to first          dS = e^{P_C} dS' + scale (q e^P)^T do
    d_values   dv = A^T do + (k e^X) dS'
    d_keys     dq, dk and the gates' gradient, from dA = do v^T, do S^T and v dS'^T

A gate's gradient is the sum, from its token on, of q dq - k dk, and of the state behind the chunk times its gradient. In
float32 that of a head's gate is instead the sum of what crosses it, where nothing cancels: pairs, keys before it that the
state behind the chunk has, queries from it on that read the state before the chunk, and that state as far as it gets through.
"""

import triton
import triton.language as tl

from .kernels import block, span
from .tiles import (
    CHANNEL,
    CONSTANT,
    HEAD,
    NONE,
    add_scores,
    causal_scores,
    channel_gradients,
    left_to_other,
    load_gates,
    load_sums,
    load_tile,
    pair_decay,
    passed,
    place_of,
    prefix,
    product,
    suffix,
    sums,
    tile,
)


@triton.jit(do_not_specialize=["T", "chunks", "parts"])
def d_states_kernel(
    q_ptr,
    do_ptr,
    g_ptr,
    d_final_ptr,
    chunks_ptr,
    chunks_of_ptr,
    d_states_ptr,
    d_initial_ptr,
    sums_ptr,
    T,
    chunks,
    parts,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GATE: tl.constexpr,
    PACKED: tl.constexpr,
    ENDS: tl.constexpr,
    EXACT: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ENDS, from a gradient of 0, and what is written then: as in states_kernel."""
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    blocks: tl.constexpr = (V + BV - 1) // BV
    kk = (tl.program_id(1) // blocks) * BK + tl.arange(0, BK)
    vv = (tl.program_id(1) % blocks) * BV + tl.arange(0, BV)
    inside = (kk[:, None] < K) & (vv[None, :] < V)
    i, j = tl.arange(0, C), tl.arange(0, C)
    gate_row: tl.constexpr = G * K if GATE == CHANNEL else G
    dS = tl.zeros([BK, BV], tl.float32)
    if not ENDS:
        dS = tl.load(block(d_final_ptr, row, G, group, K, V, kk, vv), mask=inside, other=0.0)
    first_chunk, count = span(row, chunks_of_ptr, T, parts, C, PACKED)
    all_gates = tl.zeros([BK], tl.float32)
    for m in range(count):
        c = first_chunk + count - 1 - m
        first, n = place_of(c, chunks_ptr, T, chunks, C, PACKED)
        if not ENDS:
            tl.store(block(d_states_ptr, c, G, group, K, V, kk, vv), dS, mask=inside)
        if GATE != NONE:
            g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
            up = tl.exp(prefix(g, i, j, GATE, EXACT))
            dS = passed(dS, tl.sum(g, 0)[:, None], EXACT)
            if ENDS:
                all_gates += tl.sum(g, 0)
        for r in tl.static_range(H // G):
            head = group * (H // G) + r
            q = load_tile(q_ptr, first, n, H * K, head, K, i, kk).to(tl.float32) * scale
            do = load_tile(do_ptr, first, n, H * V, head, V, i, vv)
            if GATE != NONE:
                q = q * up
            dS = product(tl.trans(q), do, dS, OPERAND, PRECISION)
    tl.store(block(d_initial_ptr, row, G, group, K, V, kk, vv), dS, mask=inside)
    if ENDS:
        tl.store(sums_ptr + (row.to(tl.int64) * G + group) * K + kk, all_gates, mask=kk < K)


@triton.jit(do_not_specialize=["T", "chunks"])
def d_values_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    do_ptr,
    d_states_ptr,
    chunks_ptr,
    sums_ptr,
    dv_ptr,
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
    c, group = tl.program_id(0) // G, tl.program_id(0) % G
    if MIXED > 0:  # noqa: SIM102 (known when compiled, the other one is not)
        if left_to_other(sums_ptr, c, chunks, group, G, K, MIXED, LEVELS > 0):
            return
    first, n = place_of(c, chunks_ptr, T, chunks, C, PACKED)
    i, j = tl.arange(0, C), tl.arange(0, C)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    gate_row: tl.constexpr = G * K if GATE == CHANNEL else G
    dv = tl.zeros([C, BV], tl.float32)
    for r in tl.static_range(H // G):
        head = group * (H // G) + r
        A = tl.zeros([C, C], tl.float32)
        for start in tl.static_range(0, K, BK):
            kk = start + tl.arange(0, BK)
            q = load_tile(q_ptr, first, n, H * K, head, K, i, kk)
            k = load_tile(k_ptr, first, n, G * K, group, K, i, kk)
            inside = (kk[:, None] < K) & (vv[None, :] < V)
            place = block(d_states_ptr, c, G, group, K, V, kk, vv)
            if GATE == CHANNEL or (r == 0 and start == 0):
                g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
            if GATE == CHANNEL and LEVELS == 0:
                half, total = load_sums(sums_ptr, c, chunks, group, G, K, kk)
                P = prefix(g, i, j, GATE, EXACT)
                q = q * tl.exp(P - half[None, :])
                k = (k * tl.exp(half[None, :] - P)).to(OPERAND)
            if r == 0:
                dS = tl.load(place, mask=inside, other=0.0)
                if GATE != CHANNEL:
                    dv = product(k, dS, dv, OPERAND, PRECISION)
                elif LEVELS == 0:
                    dv = product(k, dS * tl.exp(total - half)[:, None], dv, OPERAND, PRECISION)
                else:
                    dv = product(k * tl.exp(suffix(g, i, j, GATE, EXACT)), dS, dv, OPERAND, PRECISION)
            A = add_scores(A, q, k, g, i, j, GATE, LEVELS, EXACT, OPERAND, PRECISION)
        if r == 0 and (GATE == HEAD or GATE == CONSTANT):  # noqa: SIM109 (kernels have no "in")
            dv = dv * tl.exp(suffix(g, i, j, GATE, EXACT))
        A = causal_scores(A, g, i, j, GATE)
        do = load_tile(do_ptr, first, n, H * V, head, V, i, vv)
        dv = product(tl.trans(A * scale), do, dv, OPERAND, PRECISION)
    tl.store(tile(dv_ptr, first, G * V, group, V, i, vv), dv, mask=(i[:, None] < n) & (vv[None, :] < V))


@triton.jit(do_not_specialize=["T", "chunks", "tokens"])
def d_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    do_ptr,
    states_ptr,
    d_states_ptr,
    chunks_ptr,
    sums_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    T,
    tokens,
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
    """dg_ptr is [B * T, G, K], or of gates a head the part [blocks of K, B * T, G] of each block of key channels."""
    c, group = tl.program_id(0) // G, tl.program_id(0) % G
    if MIXED > 0:  # noqa: SIM102 (known when compiled, the other one is not)
        if left_to_other(sums_ptr, c, chunks, group, G, K, MIXED, LEVELS > 0):
            return
    first, n = place_of(c, chunks_ptr, T, chunks, C, PACKED)
    i, j = tl.arange(0, C), tl.arange(0, C)
    kk = tl.program_id(1) * BK + tl.arange(0, BK)
    gate_row: tl.constexpr = G * K if GATE == CHANNEL else G
    there = (i[:, None] < n) & (kk[None, :] < K)
    CENTRED: tl.constexpr = GATE == CHANNEL and LEVELS == 0
    TOKENS: tl.constexpr = 0 if GATE == CHANNEL else None  # summed over, and with all channels
    VALUES: tl.constexpr = 1 if GATE == CHANNEL else None
    if CENTRED:
        half, total = load_sums(sums_ptr, c, chunks, group, G, K, kk)
    dk = tl.zeros([C, BK], tl.float32)
    # The state before the chunk times its gradient, if no gate came in between, of each channel or of all.
    through = tl.zeros([BK], tl.float32) if GATE == CHANNEL else 0.0
    for r in tl.static_range(H // G):
        head = group * (H // G) + r
        dq = tl.zeros([C, BK], tl.float32)
        dA = tl.zeros([C, C], tl.float32)
        for start in tl.range(0, V, BV, num_stages=1):
            vv = start + tl.arange(0, BV)
            inside = (kk[:, None] < K) & (vv[None, :] < V)
            v = load_tile(v_ptr, first, n, G * V, group, V, i, vv)
            do = load_tile(do_ptr, first, n, H * V, head, V, i, vv)
            dA = product(do, tl.trans(v), dA, OPERAND, PRECISION)
            S = tl.load(block(states_ptr, c, G, group, K, V, kk, vv), mask=inside, other=0.0)
            if CENTRED:
                S = (S * tl.exp(half)[:, None]).to(OPERAND)
            dq = product(do, tl.trans(S), dq, OPERAND, PRECISION)
            if r == 0:
                dS = tl.load(block(d_states_ptr, c, G, group, K, V, kk, vv), mask=inside, other=0.0)
                if CENTRED:
                    dS = (dS * tl.exp(total - half)[:, None]).to(OPERAND)
                dk = product(v, tl.trans(dS), dk, OPERAND, PRECISION)
                if GATE != NONE:
                    through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), VALUES)
        dA = tl.where(i[:, None] >= j[None, :], dA * scale, 0.0)
        dq = dq * scale
        q = load_tile(q_ptr, first, n, H * K, head, K, i, kk)
        if r == 0:
            k = load_tile(k_ptr, first, n, G * K, group, K, i, kk)
        if r == 0 and GATE != NONE:
            g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
            P = prefix(g, i, j, GATE, EXACT)
            if CENTRED:
                P -= half[None, :]
                k = (k * tl.exp(-P)).to(OPERAND)
                written = k * dk
            else:
                dk = dk * tl.exp(suffix(g, i, j, GATE, EXACT))
                written = k.to(tl.float32) * dk
                through = through * tl.exp(tl.sum(g, TOKENS))
            last = through + tl.sum(written, TOKENS)  # the state behind the chunk times its gradient
            if GATE == CHANNEL:
                dg = tl.where(i[:, None] == n - 1, last[None, :], 0.0)
            else:
                pair = pair_decay(g, i, j)
                if EXACT:
                    before = tl.where(i[:, None] > j[None, :], tl.sum(written, 1)[None, :], 0.0)
                    dg = through + tl.sum(before, 1)
                else:
                    dg = tl.where(i == n - 1, last, 0.0)
        if CENTRED:
            q = (q * tl.exp(P)).to(OPERAND)
            dq = product(dA, k, dq, OPERAND, PRECISION)
            dk = product(tl.trans(dA), q, dk, OPERAND, PRECISION)
            dg += q * dq
            dq = tl.exp(P) * dq
        elif GATE == CHANNEL:
            dq, dk = channel_gradients(
                q, k, g, dA, dq * tl.exp(P), dk, i, j, LEVELS, EXACT, OPERAND, PRECISION
            )
            dg += q * dq
        else:
            if GATE != NONE:
                dA = dA * pair
                dq = dq * tl.exp(P)
                if EXACT:
                    pairs = sums(
                        j[None, :] >= i[:, None],
                        dA * product(q, tl.trans(k), None, OPERAND, PRECISION),
                        EXACT,
                    )
                    dg += tl.cumsum(tl.sum(q * dq, 1), 0, reverse=True)
                    dg += tl.sum(tl.where(i[:, None] > j[None, :], pairs, 0.0), 1)
            dq = product(dA, k, dq, OPERAND, PRECISION)
            dk = product(tl.trans(dA), q, dk, OPERAND, PRECISION)
            if GATE != NONE and not EXACT:
                dg += tl.sum(q.to(tl.float32) * dq, 1)
        tl.store(tile(dq_ptr, first, H * K, head, K, i, kk), dq, mask=there)
    if GATE == CHANNEL:
        dg -= k * dk
    if CENTRED:
        dk = dk * tl.exp(-P)
    tl.store(tile(dk_ptr, first, G * K, group, K, i, kk), dk, mask=there)
    if GATE == CHANNEL:
        dg = sums(j[None, :] >= i[:, None], dg, EXACT)
        g = load_gates(g_ptr, first, n, gate_row, group, K, i, kk, GATE)
        dg = tl.where(g == float("-inf"), 0.0, dg)
        tl.store(tile(dg_ptr, first, G * K, group, K, i, kk), dg, mask=there)
    elif GATE != NONE:
        if not EXACT:
            dg = tl.cumsum(dg - tl.sum(k.to(tl.float32) * dk, 1), 0, reverse=True)
        dg = tl.where(tl.sum(g, 1) == float("-inf"), 0.0, dg)
        token = tl.program_id(1).to(tl.int64) * tokens + first
        tl.store(dg_ptr + (token * G + group) + i * G, dg, mask=i < n)
