"""What the Triton kernels of linear_scan are made of: a step, a join, and how tiles hand on states.

Every exponent is a sum of log-decays, so it lies in [-inf, 0]. For float32 inputs a decay near one is kept as expm1, as in
stepping.py.

Tiles stand in groups. The state at the end of a group is handed on from group to group, and a tile joins to it the totals of
those before it in its own group, all at once: so only one tile in a group waits for a chain. They are always joined in the
same order, so results are bitwise the same from run to run. What is handed on lies in words of 64 bits, two numbers each,
written and read whole: -1 is a word not yet written. A program waits only for programs of a lower number, which a GPU starts
first.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

NEAR_ONE = tl.constexpr(-0.125)
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _exp(g):
    """e^g, and 0 below the normal numbers, which takes half the instructions."""
    if INTERPRETED:
        return tl.exp(g)
    else:
        return libdevice.exp2(g * LOG2_E)


@triton.jit
def _expm1_near_zero(g):
    """expm1 on [NEAR_ONE, 0], its series to float32's precision."""
    p = g * (1.0 / 720.0) + 1.0 / 120.0
    p = p * g + 1.0 / 24.0
    p = p * g + 1.0 / 6.0
    p = p * g + 0.5
    return p * (g * g) + g


@triton.jit
def decay_of(g, EXACT: tl.constexpr):
    """Two numbers whose sum is e^g: near one they are 1 and expm1(g), elsewhere e^g and 0."""
    decay = _exp(g)
    rest = tl.zeros_like(g)
    if EXACT:
        near = g > NEAR_ONE
        rest = tl.where(near, _expm1_near_zero(tl.where(near, g, 0.0)), 0.0)
        decay = tl.where(near, 1.0, decay)
    return decay, rest


@triton.jit
def step(decay, rest, h, x, EXACT: tl.constexpr):
    if EXACT:
        return decay * h + (rest * h + x)
    else:
        return decay * h + x


@triton.jit
def join(g, h, k, EXACT: tl.constexpr):
    """e^g h + k."""
    decay, rest = decay_of(g, EXACT)
    return step(decay, rest, h, k, EXACT)


@triton.jit
def _combine(g_1, k_1, g_2, k_2):
    return g_1 + g_2, join(g_2, k_1, k_2, False)


@triton.jit
def _combine_exactly(g_1, k_1, g_2, k_2):
    return g_1 + g_2, join(g_2, k_1, k_2, True)


@triton.jit
def _joined(G, k, EXACT: tl.constexpr):
    """From sums of g and end states, [S, BD]: the same of all up to each."""
    if EXACT:
        return tl.associative_scan((G, k), 0, _combine_exactly)
    else:
        return tl.associative_scan((G, k), 0, _combine)


@triton.jit
def last(x, SIZE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SIZE)[:, None] == SIZE - 1, x, tl.zeros_like(x)), 0)


@triton.jit
def before_segments(G, k, s, S: tl.constexpr, BD: tl.constexpr, EXACT: tl.constexpr):
    """From each segment's sum of g and end state, [S, BD]: the same of all that lies before it, and of the tile [BD]."""
    if S == 1:
        G_tile, k_tile = tl.sum(G, 0), tl.sum(k, 0)
        G, k = tl.zeros_like(G), tl.zeros_like(k)
    else:
        G, k = _joined(G, k, EXACT)
        G_tile, k_tile = last(G, S), last(k, S)
        previous = tl.broadcast_to(tl.maximum(s - 1, 0), [S, BD])
        G = tl.where(s > 0, tl.gather(G, previous, 0), 0.0)
        k = tl.where(s > 0, tl.gather(k, previous, 0), 0.0)
    return G, k, G_tile, k_tile


@triton.jit
def column_of(B, D: tl.constexpr, BD: tl.constexpr):
    """Which tile and which columns this program has: tile, column, b, d [BD]."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    columns = B * blocks
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    d = (column % blocks) * BD + tl.arange(0, BD)
    return tile, column, (column // blocks).to(tl.int64), d


@triton.jit
def word_of(first, second):
    """A float and 32 bits as one word: the float above, and never as that NaN which looks unwritten."""
    upper = tl.where(first == first, first.to(tl.int32, bitcast=True), 0x7FC00000)
    return (upper.to(tl.int64) << 32) | second.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def parts_of(word):
    """The float of a word, and its 32 bits as a whole number."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32)


@triton.jit
def read(place, mask):
    """Words as they are now, and 0 where there is none."""
    return tl.load(place, mask=mask, other=0, volatile=True)


@triton.jit
def wait_for(place, mask):
    """The words once all are written."""
    while tl.max((read(place, mask) == -1).to(tl.int32)) != 0:
        pass
    # read again: where several threads hold the same word, only one of them was asked
    return read(place, mask)


@triton.jit
def through(
    carry,
    G_tile,
    k_tile,
    tile,
    tiles,
    column,
    inside,
    words_ptr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BD: tl.constexpr,
):
    """The state before the tile and the one after it; `carry` is the one before the first tile.

    words_ptr is [columns, tiles, BD]: of the last tile of a group the state after it, of the others their totals.
    """
    if CHAINED:
        in_group = tile % GROUP
        words = words_ptr + (column.to(tl.int64) * tiles + tile) * BD + tl.arange(0, BD)
        if (in_group < GROUP - 1) & (tile < tiles - 1):
            tl.store(words, word_of(G_tile, k_tile), mask=inside)
        if tile > 0:
            # the state after the group before, then the totals of the tiles before this one in its own
            n = tl.arange(0, GROUP)[:, None]
            exists = (n <= in_group) & (n + tile > in_group)
            place = words[None, :] + (n - in_group - 1) * BD
            G, k = parts_of(wait_for(place, exists & inside[None, :]))
            G, k = _joined(G, k.to(tl.float32, bitcast=True), EXACT)
            k = last(k, GROUP)
            carry = join(last(G, GROUP), carry, k, EXACT) if tile < GROUP else k
        end = join(G_tile, carry, k_tile, EXACT)
        if (in_group == GROUP - 1) & (tile < tiles - 1):
            tl.store(words, word_of(tl.zeros_like(end), end), mask=inside)
    else:
        end = join(G_tile, carry, k_tile, EXACT)
    return carry, end


@triton.jit
def place_of(l: tl.constexpr, n, i, sequence_tile, one: tl.constexpr):
    """The sequence of a pack that step l of a segment is in (-1 is none), and whether it is that one's first or last step.

    n is how many steps are left from the segment's first on, i how many lie before it.
    """
    sequence = tl.load(sequence_tile + one * l, mask=l < n, other=-1)
    before = tl.load(sequence_tile + one * (l - 1), mask=(l < n) & (i + l > 0), other=-1)
    after = tl.load(sequence_tile + one * (l + 1), mask=l + 1 < n, other=-1)
    begins, ends = (sequence >= 0) & (sequence != before), (sequence >= 0) & (sequence != after)
    return sequence.to(tl.int64), begins, ends
