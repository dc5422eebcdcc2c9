"""What the Triton kernels of gated_linear_attention are made of: which tokens a chunk has, and how gates act inside it.

Gates are [C, 1] (a head has one) or [C, BK] (a key channel has one). Every exponent is a sum of the gates in between, so it
lies in [-inf, 0], but for one case: where the sums over both halves of a chunk are mild (above MILD) in each channel, all is
seen from its middle, r: queries are q e^{P - r}, keys k e^{r - P}, and one product serves all pairs. The range of float32 and
bfloat16 bears these factors, and half-precision products lose nothing by them. A launch has either the mild chunks
(LEVELS = 0) or the others; with float32 inputs, all are others.
"""

import triton
import triton.language as tl

from ..linear_scan.lookback import decay_of

NONE = tl.constexpr(0)  # kinds of gates
CONSTANT = tl.constexpr(1)
HEAD = tl.constexpr(2)
CHANNEL = tl.constexpr(3)
MILD = tl.constexpr(-75.0)
CLOSED = tl.constexpr(-1e30)  # e^CLOSED is 0, and unlike -inf it may be multiplied by 0
SHUT = tl.constexpr(-128.0)  # e^SHUT is 0 in float32, and sums of it keep gates of 1e-6 apart in float64


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
    place = tile(ptr, first, row, group, width, i, d)
    return tl.load(place, mask=(i[:, None] < n) & (d[None, :] < width), other=0.0)


@triton.jit
def tile(ptr, first, row, group, width, i, d):
    """Pointers to it: one of 64 bits and offsets of 32."""
    return ptr + (first * row + group * width) + (i[:, None] * row + d[None, :])


@triton.jit
def load_gates(ptr, first, n, row, group, K, i, d, GATE: tl.constexpr):
    """Gates [C, 1] or [C, BK] in float32, 0 outside; without gates all are 0."""
    there = i[:, None] < n
    if GATE == NONE:
        g = tl.zeros([i.shape[0], 1], tl.float32)
    elif GATE == CHANNEL:
        g = load_tile(ptr, first, n, row, group, K, i, d)
    elif GATE == HEAD:
        g = tl.load(ptr + (first * row + group) + i[:, None] * row, mask=there, other=0.0)
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
def sums(which, x, EXACT: tl.constexpr):
    """which x: of each column of x [C, N], in float32, the sums over the rows that `which` [C, C] names.

    On the tensor cores, which are faster here than a scan: of zeros and ones times two bfloat16 that make up x (16 bits,
    beside the 8 of half-precision products).
    """
    if EXACT:
        return tl.dot(which.to(tl.float32), x, input_precision="tf32x3")
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        ones = tl.where(which, 1.0, 0.0).to(tl.bfloat16)
        return tl.dot(ones, low, tl.dot(ones, high))


@triton.jit
def running(g):
    """Of gates [C, 1] the sums up to each token and with it, [C] in float64: differences of them are exact enough."""
    return tl.cumsum(tl.sum(tl.maximum(g, SHUT).to(tl.float64), 1), 0)


@triton.jit
def pair_decay(g, i, j):
    """e^{gates j+1 .. i} [C, C] of gates [C, 1] for j <= i, 0 above the diagonal."""
    c = running(g)
    high = c.to(tl.float32)
    low = (c - high.to(tl.float64)).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(i[:, None] >= j[None, :], between, float("-inf")))


@triton.jit
def prefix(g, i, j, GATE: tl.constexpr, EXACT: tl.constexpr):
    """Sums of gates up to each token and with it."""
    if GATE == CHANNEL:
        return sums(j[None, :] <= i[:, None], tl.maximum(g, CLOSED), EXACT)
    else:
        return running(g).to(tl.float32)[:, None]


@triton.jit
def suffix(g, i, j, GATE: tl.constexpr, EXACT: tl.constexpr):
    """Sums of the gates behind each token."""
    if GATE == CHANNEL:
        return sums(j[None, :] > i[:, None], tl.maximum(g, CLOSED), EXACT)
    else:
        c = running(g)
        return (tl.sum(tl.where(i == i.shape[0] - 1, c, 0.0), 0) - c).to(tl.float32)[:, None]


@triton.jit
def load_sums(sums_ptr, c, chunks, group, G: tl.constexpr, K: tl.constexpr, d):
    """Of chunk c's channels d the gates' sums over the first half and over the whole; sums_ptr [2, chunks, G, K]."""
    place = sums_ptr + (c.to(tl.int64) * G + group) * K + d
    step = tl.cast(chunks, tl.int64) * (G * K)
    return tl.load(place, mask=d < K, other=0.0), tl.load(place + step, mask=d < K, other=0.0)


@triton.jit
def left_to_other(
    sums_ptr, c, chunks, group, G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, STRONG: tl.constexpr
):
    """Whether chunk c is left to the other one of two launches, of which one has the mild chunks."""
    half, total = load_sums(sums_ptr, c, chunks, group, G, K, tl.arange(0, BLOCK))
    mild = tl.min(tl.minimum(half, tl.maximum(total, CLOSED) - half)) > MILD
    return mild == STRONG


@triton.jit
def level(g, i, j, n, EXACT: tl.constexpr):
    """Weights [C, BK] by which queries in second halves and keys in first halves meet, in blocks of two halves of 2^n tokens,
    and which pairs [C, C] do.

    A query has e^{gates from the start of its half to itself}, a key e^{gates after it to the end of its half}.
    """
    block, key_block = i[:, None] >> n, j[None, :] >> n
    second = (block & 1) == 1
    ours = (block == key_block) & tl.where(second, j[None, :] <= i[:, None], j[None, :] > i[:, None])
    return tl.exp(sums(ours, tl.maximum(g, CLOSED), EXACT)), second & (key_block + 1 == block)


@triton.jit
def channel_scores(
    q, k, g, i, j, LEVELS: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr
):
    """A [C, C] with A_ij = sum_k q_ik k_jk e^{gates j+1 .. i} for j <= i, 0 above the diagonal."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    A = tl.where(i[:, None] == j[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for n in tl.range(LEVELS, num_stages=1):
        w, pairs = level(g, i, j, n, EXACT)
        A += tl.where(pairs, product(q * w, tl.trans(k * w), None, OPERAND, PRECISION), 0.0)
    return A


@triton.jit
def add_scores(
    A, q, k, g, i, j,
    GATE: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A with what a tile of key channels adds to all pairs; gates of a head are left to `causal_scores`."""
    if GATE == CHANNEL and LEVELS > 0:
        A += channel_scores(q, k, g, i, j, LEVELS, EXACT, OPERAND, PRECISION)
    else:
        A = product(q, tl.trans(k), A, OPERAND, PRECISION)
    return A


@triton.jit
def causal_scores(A, g, i, j, GATE: tl.constexpr):
    """0 above the diagonal, and on and below it with the decay of gates of a head."""
    if GATE == NONE or GATE == CHANNEL:  # noqa: SIM109 (kernels have no "in")
        return tl.where(i[:, None] >= j[None, :], A, 0.0)
    else:
        return A * pair_decay(g, i, j)


@triton.jit
def channel_gradients(
    q,
    k,
    g,
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
    own = tl.sum(tl.where(i[:, None] == j[None, :], dA, 0.0), 1)[:, None]
    dq += own * k
    dk += own * q
    for n in tl.range(LEVELS, num_stages=1):
        w, pairs = level(g, i, j, n, EXACT)
        part = tl.where(pairs, dA, 0.0)
        dq += w * product(part, k * w, None, OPERAND, PRECISION)
        dk += w * product(tl.trans(part), q * w, None, OPERAND, PRECISION)
    return dq, dk
