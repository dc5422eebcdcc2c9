"""What the Triton kernels of gated_linear_attention are made of: which tokens a chunk has, and how gates act inside it.

Gates are [C, 1] (a head has one) or [C, BK] (a key channel has one). Every exponent is a sum of the gates in between, so it
lies in [-inf, 0], but for one case: where the sum over the whole chunk is mild (above MILD) in each channel, sums are taken
from its middle, one product serves all pairs, and a float32 exponent bears the difference without loss to half-precision
products. A launch has either the mild chunks (LEVELS = 0) or the others; with float32 inputs, all are others.
"""

import triton
import triton.language as tl

from ..linear_scan.lookback import decay_of

NONE = tl.constexpr(0)  # kinds of gates
CONSTANT = tl.constexpr(1)
HEAD = tl.constexpr(2)
CHANNEL = tl.constexpr(3)
MILD = tl.constexpr(-60.0)
CLOSED = tl.constexpr(-1e30)  # e^CLOSED is 0, and unlike -inf it may be multiplied by 0


@triton.jit
def place_of(c, chunks_ptr, T, chunks, C: tl.constexpr, PACKED: tl.constexpr):
    """Chunk c: its first token among all B * T, and how many it has. Of a pack, chunks_ptr holds both [2, chunks]."""
    if PACKED:
        first = tl.load(chunks_ptr + c).to(tl.int64)
        n = tl.load(chunks_ptr + chunks + c).to(tl.int32)
    else:
        each = (T + C - 1) // C
        b, m = c // each, c % each
        first = b.to(tl.int64) * T + m * C
        n = tl.minimum(T - m * C, C)
    return first, n


@triton.jit
def load_tile(ptr, first, n, row, group, width, i, d):
    """[C, BK or BV] of a tensor [B * T, groups, width] with `row` numbers a token; 0 outside."""
    place = ptr + (first + i[:, None]) * row + group.to(tl.int64) * width + d[None, :]
    return tl.load(place, mask=(i[:, None] < n) & (d[None, :] < width), other=0.0)


@triton.jit
def load_gates(ptr, first, n, row, group, K, i, d, GATE: tl.constexpr, SHIFT: tl.constexpr):
    """Gates [C, 1] or [C, BK] in float32, 0 outside; shifted, of token i + 1."""
    there = (i[:, None] + SHIFT) < n
    if GATE == CHANNEL:
        place = ptr + (first + i[:, None] + SHIFT) * row + group.to(tl.int64) * K + d[None, :]
        g = tl.load(place, mask=there & (d[None, :] < K), other=0.0)
    elif GATE == HEAD:
        g = tl.load(ptr + (first + i[:, None] + SHIFT) * row + group, mask=there, other=0.0)
    else:
        g = tl.where(there, tl.load(ptr + group), 0.0)
    return g.to(tl.float32)


@triton.jit
def passed(S, total, EXACT: tl.constexpr):
    """A state behind a chunk of which it passes all gates; a decay near one must not drift over many chunks."""
    decay, rest = decay_of(total, EXACT)
    return decay * S + rest * S if EXACT else decay * S


@triton.jit
def product(a, b, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b with operands of the dtype OPERAND."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), acc, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def pair_decay(g, i, j, GATE: tl.constexpr):
    """e^{gates j+1 .. i} [C, C] of gates [C, 1] for j <= i, 0 above the diagonal."""
    causal = i[:, None] >= j[None, :]
    if GATE == NONE:
        return causal.to(tl.float32)
    else:
        between = tl.where(i[:, None] > j[None, :], tl.broadcast_to(g, [g.shape[0], g.shape[0]]), 0.0)
        return tl.where(causal, tl.exp(tl.cumsum(between, 0)), 0.0)


@triton.jit
def prefix(g, i, j, GATE: tl.constexpr):
    """Sums of gates up to each token and with it."""
    if GATE == CHANNEL:
        return tl.cumsum(tl.maximum(g, CLOSED), 0)
    else:  # a scan of one column is more than some versions of Triton can do
        return tl.sum(tl.where(j[None, :] <= i[:, None], tl.sum(g, 1)[None, :], 0.0), 1)[:, None]


@triton.jit
def suffix(behind, i, j, GATE: tl.constexpr):
    """Sums of the gates behind each token, from gates shifted by one."""
    if GATE == CHANNEL:
        return tl.cumsum(behind, 0, reverse=True)
    else:
        return tl.sum(tl.where(j[None, :] >= i[:, None], tl.sum(behind, 1)[None, :], 0.0), 1)[:, None]


@triton.jit
def left_to_other(mild_ptr, c, group, chunks, G: tl.constexpr, blocks: tl.constexpr, EXACT: tl.constexpr):
    """Whether chunk c is left to the other one of two launches: with EXACT, the mild ones are; mild_ptr [blocks, chunks, G]."""
    least = tl.load(mild_ptr + c * G + group)
    for b in tl.static_range(1, blocks):
        least = tl.minimum(least, tl.load(mild_ptr + (b * chunks + c) * G + group))
    return (least > MILD) == EXACT


@triton.jit
def centred(g, P, i):
    """Sums of gates from the middle of the chunk to each token, below 0 behind it and above before it."""
    C: tl.constexpr = g.shape[0]
    return P - tl.sum(tl.where(i[:, None] < C // 2, g, 0.0), 0)[None, :]


@triton.jit
def level(g, i, j, n, EXACT: tl.constexpr):
    """Weights [C, BK] by which queries in second halves and keys in first halves meet, in blocks of two halves of 2^n tokens,
    and which pairs [C, C] do.

    A query has e^{gates from the start of its half to itself}, a key e^{gates after it to the end of its half}.
    """
    block, key_block = i[:, None] >> n, j[None, :] >> n
    second = (block & 1) == 1
    ours = (block == key_block) & tl.where(second, j[None, :] <= i[:, None], j[None, :] > i[:, None])
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"  # an exponent's error counts where it is small
    sums = product(ours.to(tl.float32), tl.maximum(g, CLOSED), None, tl.float32, precision)
    return tl.exp(sums), second & (key_block + 1 == block)


@triton.jit
def channel_scores(
    q,
    k,
    g,
    P,
    i,
    j,
    LEVELS: tl.constexpr,
    EXACT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A [C, C] with A_ij = sum_k q_ik k_jk e^{gates j+1 .. i} for j <= i, 0 above the diagonal. P are the gates' sums."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    if LEVELS == 0:
        P = centred(g, P, i)
        A = product(q * tl.exp(P), tl.trans(k * tl.exp(-P)), None, OPERAND, PRECISION)
        return tl.where(i[:, None] >= j[None, :], A, 0.0)
    else:
        A = tl.where(i[:, None] == j[None, :], tl.sum(q * k, 1)[:, None], 0.0)
        for n in tl.range(LEVELS, num_stages=1):
            w, pairs = level(g, i, j, n, EXACT)
            A += tl.where(pairs, product(q * w, tl.trans(k * w), None, OPERAND, PRECISION), 0.0)
        return A


@triton.jit
def channel_gradients(
    q,
    k,
    g,
    P,
    dA,
    dq,
    dk,
    i,
    j,
    LEVELS: tl.constexpr,
    EXACT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq and dk with what channel_scores hands back for dA [C, C], which is 0 above the diagonal."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    if LEVELS == 0:
        P = centred(g, P, i)
        dq += tl.exp(P) * product(dA, k * tl.exp(-P), None, OPERAND, PRECISION)
        dk += tl.exp(-P) * product(tl.trans(dA), q * tl.exp(P), None, OPERAND, PRECISION)
    else:
        own = tl.sum(tl.where(i[:, None] == j[None, :], dA, 0.0), 1)[:, None]
        dq += own * k
        dk += own * q
        for n in tl.range(LEVELS, num_stages=1):
            w, pairs = level(g, i, j, n, EXACT)
            part = tl.where(pairs, dA, 0.0)
            dq += w * product(part, k * w, None, OPERAND, PRECISION)
            dk += w * product(tl.trans(part), q * w, None, OPERAND, PRECISION)
    return dq, dk
