"""What the Triton kernels of complex recurrences are made of, as lookback.py is for real ones.

    h_t = e^{g_t + i phase_t} h_{t-1} + x_t

An angle is a whole number, of which 2^48 are a turn: so sums of angles are exact, however many turns they are. A decay and a
turn are applied one after the other, each with what its rounding lost where that would repeat at every step or in every tile.

A tile hands on two words: the sum of its log-decays with its angle, of which 2^32 are a turn there, and the state that it ends
with from a state of 0. The last tile of a group hands on one, the state after it.
"""

import triton
import triton.language as tl

from .lookback import decay_of, parts_of, read, wait_for, word_of

PER_RADIAN = tl.constexpr(0.15915494309189535)  # turns
RADIANS = tl.constexpr(6.283185307179586 / 2**48)  # of the unit of angles


@triton.jit
def load(place, mask, COMPLEX: tl.constexpr):
    """Real and imaginary part, in float32, of real numbers or of complex ones, which are read whole as 64 bits."""
    if COMPLEX:
        word = tl.load(place, mask=mask, other=0)
        re, im = word.to(tl.int32), (word >> 32).to(tl.int32)
        return re.to(tl.float32, bitcast=True), im.to(tl.float32, bitcast=True)
    else:
        re = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        return re, tl.zeros_like(re)


@triton.jit
def store(place, re, im, mask):
    low = re.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(place, (im.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low, mask=mask)


@triton.jit
def angle_of(phase):
    """Radians as an angle in [0, 2^48); 0 for what is not finite."""
    turns = phase.to(tl.float64) * PER_RADIAN
    turns = turns - tl.floor(turns)
    turns = tl.where(turns == turns, turns, 0.0)
    return (turns * 281474976710656.0).to(tl.int64)


@triton.jit
def _quarters(angle):
    """An angle as quarter turns, mod 4, and a rest of at most half of one."""
    quarters = (angle + (1 << 45)) >> 46
    return (quarters & 3).to(tl.int32), angle - (quarters << 46)


@triton.jit
def _by_quarters(quarters, c, s):
    odd = (quarters & 1) == 1
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    cos = tl.where((quarters == 1) | (quarters == 2), -cos, cos)
    return cos, tl.where(quarters >= 2, -sin, sin)


@triton.jit
def turn_of(angle):
    """Cosine and sine in float32: their series, whose last terms are 2e-9 and 1e-10 of the first."""
    quarters, rest = _quarters(angle)
    r = rest.to(tl.float32) * RADIANS
    q = r * r
    s = ((q * (1.0 / 362880.0) - 1.0 / 5040.0) * q + 1.0 / 120.0) * q - 1.0 / 6.0
    c = (((q * (-1.0 / 3628800.0) + 1.0 / 40320.0) * q - 1.0 / 720.0) * q + 1.0 / 24.0) * q - 0.5
    return _by_quarters(quarters, c * q + 1.0, s * (q * r) + r)


@triton.jit
def exact_turn_of(angle):
    """Cosine and sine, rounded, and what the rounding lost: from their series in float64."""
    quarters, rest = _quarters(angle)
    r = rest.to(tl.float64) * RADIANS
    q = r * r
    s = q * (1.0 / 6227020800.0) - 1.0 / 39916800.0
    s = (((s * q + 1.0 / 362880.0) * q - 1.0 / 5040.0) * q + 1.0 / 120.0) * q - 1.0 / 6.0
    c = q * (-1.0 / 87178291200.0) + 1.0 / 479001600.0
    c = ((((c * q - 1.0 / 3628800.0) * q + 1.0 / 40320.0) * q - 1.0 / 720.0) * q + 1.0 / 24.0) * q - 0.5
    cos, sin = _by_quarters(quarters, c * q + 1.0, s * (q * r) + r)
    c, s = cos.to(tl.float32), sin.to(tl.float32)
    return c, s, (cos - c.to(tl.float64)).to(tl.float32), (sin - s.to(tl.float64)).to(tl.float32)


@triton.jit
def turned(c, s, c_lost, s_lost, re, im, KEEP: tl.constexpr):
    """(c + i s) h, with what rounding lost of the turn."""
    if KEEP:
        return c * re + (c_lost * re - s_lost * im - s * im), s * re + (s_lost * re + c_lost * im + c * im)
    else:
        return c * re - s * im, s * re + c * im


@triton.jit
def decayed(decay, rest, re, im, x_re, x_im):
    """(decay + rest) h + x."""
    return decay * re + (rest * re + x_re), decay * im + (rest * im + x_im)


@triton.jit
def join(g, angle, re, im, k_re, k_im, EXACT: tl.constexpr):
    """e^{g + i angle} h + k; exactly where it is applied over and over."""
    decay, rest = decay_of(g, True)
    if EXACT:
        c, s, c_lost, s_lost = exact_turn_of(angle)
    else:
        c, s = turn_of(angle)
        c_lost, s_lost = c, s  # not used
    re, im = turned(c, s, c_lost, s_lost, re, im, EXACT)
    return decayed(decay, rest, re, im, k_re, k_im)


@triton.jit
def _combine(g_1, a_1, re_1, im_1, g_2, a_2, re_2, im_2):
    re, im = join(g_2, a_2, re_1, im_1, re_2, im_2, False)
    return g_1 + g_2, a_1 + a_2, re, im


@triton.jit
def _words_of(G, A, re, im):
    """What is handed on: an angle is cut to 2^-32 turns."""
    return word_of(G, ((A + (1 << 15)) >> 16).to(tl.int32)), word_of(re, im)


@triton.jit
def _parts_of(first, second):
    G, A = parts_of(first)
    re, im = parts_of(second)
    return G, A.to(tl.int64) << 16, re, im.to(tl.float32, bitcast=True)


@triton.jit
def _sums(a_1, b_1, a_2, b_2):
    return a_1 + a_2, b_1 + b_2


@triton.jit
def _last(first, second, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] == SIZE - 1
    first, second = tl.reduce((tl.where(at, first, 0), tl.where(at, second, 0)), 0, _sums)
    return _parts_of(first, second)


@triton.jit
def before_segments(G, A, re, im, s, S: tl.constexpr, BD: tl.constexpr):
    """From each segment's sums and end state, [S, BD]: those of all that lies before it, and of the tile [BD]."""
    if S == 1:
        G_tile, A_tile, re_tile, im_tile = tl.sum(G, 0), tl.sum(A, 0), tl.sum(re, 0), tl.sum(im, 0)
        G, A, re, im = tl.zeros_like(G), tl.zeros_like(A), tl.zeros_like(re), tl.zeros_like(im)
    else:
        G, A, re, im = tl.associative_scan((G, A, re, im), 0, _combine)
        first, second = _words_of(G, A, re, im)
        G_tile, A_tile, re_tile, im_tile = _last(first, second, S)
        previous = tl.broadcast_to(tl.maximum(s - 1, 0), [S, BD])
        first = tl.where(s > 0, tl.gather(first, previous, 0), 0)
        second = tl.where(s > 0, tl.gather(second, previous, 0), 0)
        G, A, re, im = _parts_of(first, second)
    return G, A, re, im, G_tile, A_tile, re_tile, im_tile


@triton.jit
def through(
    re,
    im,
    G_tile,
    A_tile,
    re_tile,
    im_tile,
    tile,
    tiles,
    column,
    inside,
    words_ptr,
    CHAINED: tl.constexpr,
    GROUP: tl.constexpr,
    BD: tl.constexpr,
):
    """The state before the tile and the one after it; (re, im) is the one before the first tile.

    words_ptr is [columns, tiles, 2, BD]. The state passes from group to group by two exact joins.
    """
    if CHAINED:
        in_group = tile % GROUP
        words = words_ptr + (column.to(tl.int64) * tiles + tile) * (2 * BD) + tl.arange(0, BD)
        if (in_group < GROUP - 1) & (tile < tiles - 1):
            first, second = _words_of(G_tile, A_tile, re_tile, im_tile)
            tl.store(words, first, mask=inside)
            tl.store(words + BD, second, mask=inside)
        if tile > 0:
            n = tl.arange(0, GROUP)[:, None]
            exists = (n < in_group) & inside[None, :]
            place = words[None, :] + (n - in_group) * (2 * BD)
            unwritten = 1
            while unwritten != 0:
                none = (read(place, exists) == -1) | (read(place + BD, exists) == -1)
                unwritten = tl.max(none.to(tl.int32))
            # read again, as in wait_for
            G, A, k_re, k_im = _parts_of(read(place, exists), read(place + BD, exists))
            G, A, k_re, k_im = tl.associative_scan((G, A, k_re, k_im), 0, _combine)
            first, second = _words_of(G, A, k_re, k_im)
            G, A, k_re, k_im = _last(first, second, GROUP)
            if tile >= GROUP:
                re, im = parts_of(wait_for(words - (in_group + 1) * (2 * BD) + BD, inside))
                im = im.to(tl.float32, bitcast=True)
            re, im = join(G, A, re, im, k_re, k_im, True)
        end_re, end_im = join(G_tile, A_tile, re, im, re_tile, im_tile, True)
        if (in_group == GROUP - 1) & (tile < tiles - 1):
            tl.store(words + BD, word_of(end_re, end_im), mask=inside)
    else:
        end_re, end_im = join(G_tile, A_tile, re, im, re_tile, im_tile, True)
    return re, im, end_re, end_im
