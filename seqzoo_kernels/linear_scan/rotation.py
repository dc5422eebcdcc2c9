"""What the Triton kernels of complex recurrences are made of, as lookback.py is for real ones.

    h_t = e^{g_t + i phase_t} h_{t-1} + x_t

An angle is a whole number, of which 2^48 are a turn: so sums of angles are exact, however many turns they are. Where it becomes
a cosine and a sine it is cut to 2^-32 turns, a short one. A factor e^{g + i angle} is one complex number, rounded: a segment is
so short that this does not add up, and what joins segments and tiles is made anew from the sums of each. Where a factor is the
same at every step, and from group to group, it is applied with what its rounding lost.

A tile hands on two words: the sum of its log-decays with its short angle, and the state that it ends with from a state of 0.
The last tile of a group hands on one, the state after it.
"""

import triton
import triton.language as tl

from .lookback import decay_of, parts_of, read, wait_for, word_of

PER_RADIAN = tl.constexpr(0.15915494309189535)  # turns
RADIANS = tl.constexpr(6.283185307179586 / 2**48)  # of the unit of angles
SHORT_RADIANS = tl.constexpr(6.283185307179586 / 2**32)


@triton.jit
def _word(re, im):
    low = re.to(tl.uint32, bitcast=True).to(tl.int64)
    return (im.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def _number(word):
    re, im = word.to(tl.int32), (word >> 32).to(tl.int32)
    return re.to(tl.float32, bitcast=True), im.to(tl.float32, bitcast=True)


@triton.jit
def load(place, mask, COMPLEX: tl.constexpr):
    """Real and imaginary part, in float32, of real numbers or of complex ones, which are read whole as 64 bits."""
    if COMPLEX:
        return _number(tl.load(place, mask=mask, other=0))
    else:
        re = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        return re, tl.zeros_like(re)


@triton.jit
def store(place, re, im, mask):
    tl.store(place, _word(re, im), mask=mask)


@triton.jit
def angle_of(phase):
    """Radians as an angle in [0, 2^48); 0 for what is not finite."""
    turns = phase.to(tl.float64) * PER_RADIAN
    turns = turns - tl.floor(turns)
    turns = tl.where(turns == turns, turns, 0.0)
    return (turns * 281474976710656.0).to(tl.int64)


@triton.jit
def short(angle):
    """An angle, rounded to one of which 2^32 are a turn."""
    return ((angle + (1 << 15)) >> 16).to(tl.int32)


@triton.jit
def _by_quarters(quarters, c, s):
    odd = (quarters & 1) == 1
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    cos = tl.where((quarters == 1) | (quarters == 2), -cos, cos)
    return cos, tl.where(quarters >= 2, -sin, sin)


@triton.jit
def turn_of(angle):
    """Cosine and sine in float32 of a short angle: their series, whose last terms are 2e-9 and 1e-10 of the first."""
    quarters = (angle + (1 << 29)) >> 30
    r = (angle - (quarters << 30)).to(tl.float32) * SHORT_RADIANS
    q = r * r
    s = ((q * (1.0 / 362880.0) - 1.0 / 5040.0) * q + 1.0 / 120.0) * q - 1.0 / 6.0
    c = (((q * (-1.0 / 3628800.0) + 1.0 / 40320.0) * q - 1.0 / 720.0) * q + 1.0 / 24.0) * q - 0.5
    return _by_quarters(quarters & 3, c * q + 1.0, s * (q * r) + r)


@triton.jit
def modulus_of(g):
    decay, rest = decay_of(g, True)
    return decay + rest


@triton.jit
def factor_of(g, angle):
    """e^{g + i angle} of a short angle, in float32."""
    decay = modulus_of(g)
    c, s = turn_of(angle)
    return decay * c, decay * s


@triton.jit
def exact_factor_of(g, angle):
    """e^{g + i angle}, rounded, and what the rounding lost: cosine and sine from their series in float64."""
    quarters = (angle + (1 << 45)) >> 46
    r = (angle - (quarters << 46)).to(tl.float64) * RADIANS
    q = r * r
    s = q * (1.0 / 6227020800.0) - 1.0 / 39916800.0
    s = (((s * q + 1.0 / 362880.0) * q - 1.0 / 5040.0) * q + 1.0 / 120.0) * q - 1.0 / 6.0
    c = q * (-1.0 / 87178291200.0) + 1.0 / 479001600.0
    c = ((((c * q - 1.0 / 3628800.0) * q + 1.0 / 40320.0) * q - 1.0 / 720.0) * q + 1.0 / 24.0) * q - 0.5
    cos, sin = _by_quarters((quarters & 3).to(tl.int32), c * q + 1.0, s * (q * r) + r)
    decay, rest = decay_of(g, True)
    modulus = decay.to(tl.float64) + rest.to(tl.float64)
    cos, sin = modulus * cos, modulus * sin
    re, im = cos.to(tl.float32), sin.to(tl.float32)
    return re, im, (cos - re.to(tl.float64)).to(tl.float32), (sin - im.to(tl.float64)).to(tl.float32)


@triton.jit
def join(f_re, f_im, re, im, k_re, k_im):
    """f h + k."""
    return f_re * re + (k_re - f_im * im), f_im * re + (f_re * im + k_im)


@triton.jit
def step(f_re, f_im, lost_re, lost_im, re, im, x_re, x_im, KEEP: tl.constexpr):
    """f h + x, with what rounding lost of f."""
    if KEEP:
        x_re, x_im = join(lost_re, lost_im, re, im, x_re, x_im)
    return join(f_re, f_im, re, im, x_re, x_im)


@triton.jit
def _combine(f_re_1, f_im_1, re_1, im_1, f_re_2, f_im_2, re_2, im_2):
    f_re, f_im = f_re_2 * f_re_1 - f_im_2 * f_im_1, f_im_2 * f_re_1 + f_re_2 * f_im_1
    re, im = join(f_re_2, f_im_2, re_1, im_1, re_2, im_2)
    return f_re, f_im, re, im


@triton.jit
def _sums(g_1, a_1, word_1, g_2, a_2, word_2):
    return g_1 + g_2, a_1 + a_2, word_1 + word_2


@triton.jit
def _total(G, A, re, im, SIZE: tl.constexpr):
    """Of rows [SIZE, BD]: the sums of log-decays and of angles, and the state of the last one."""
    last = tl.arange(0, SIZE)[:, None] == SIZE - 1
    G, A, word = tl.reduce((G, A, tl.where(last, _word(re, im), 0)), 0, _sums)
    re, im = _number(word)
    return G, A, re, im


@triton.jit
def before_segments(G, A, re, im, s, S: tl.constexpr, BD: tl.constexpr):
    """From each segment's sums and end state, [S, BD]: factor and state of all before it, and the tile's sums and state."""
    if S == 1:
        G_tile, A_tile, re_tile, im_tile = _total(G, A, re, im, S)
        re, im = tl.zeros_like(G), tl.zeros_like(G)
        f_re, f_im = re + 1.0, im
    else:
        f_re, f_im = factor_of(G, short(A))
        f_re, f_im, re, im = tl.associative_scan((f_re, f_im, re, im), 0, _combine)
        G_tile, A_tile, re_tile, im_tile = _total(G, A, re, im, S)
        previous = tl.broadcast_to(tl.maximum(s - 1, 0), [S, BD])
        f_re, f_im = _number(tl.gather(_word(f_re, f_im), previous, 0))
        f_re, f_im = tl.where(s > 0, f_re, 1.0), tl.where(s > 0, f_im, 0.0)
        re, im = _number(tl.where(s > 0, tl.gather(_word(re, im), previous, 0), 0))
    return f_re, f_im, re, im, G_tile, A_tile, re_tile, im_tile


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
    GROUP: tl.constexpr,
    BD: tl.constexpr,
):
    """The state before the tile; (re, im) is the one before the first tile.

    words_ptr is [columns, tiles, 2, BD].
    """
    in_group = tile % GROUP
    words = words_ptr + (column.to(tl.int64) * tiles + tile) * (2 * BD) + tl.arange(0, BD)
    if (tile < tiles - 1) & (in_group < GROUP - 1):
        tl.store(words, word_of(G_tile, short(A_tile)), mask=inside)
        tl.store(words + BD, word_of(re_tile, im_tile), mask=inside)
    if tile > 0:
        n = tl.arange(0, GROUP)[:, None]
        exists = (n < in_group) & inside[None, :]
        place = words[None, :] + (n - in_group) * (2 * BD)
        unwritten = 1
        while unwritten != 0:
            none = (read(place, exists) == -1) | (read(place + BD, exists) == -1)
            unwritten = tl.max(none.to(tl.int32))
        # read again, as in wait_for
        G, A = parts_of(read(place, exists))
        k_re, k_im = parts_of(read(place + BD, exists))
        k_im = k_im.to(tl.float32, bitcast=True)
        each_re, each_im = factor_of(G, A)
        each_re, each_im, k_re, k_im = tl.associative_scan((each_re, each_im, k_re, k_im), 0, _combine)
        G, A, k_re, k_im = _total(G, A, k_re, k_im, GROUP)
        if tile >= GROUP:
            re, im = parts_of(wait_for(words - (in_group + 1) * (2 * BD) + BD, inside))
            im = im.to(tl.float32, bitcast=True)
        if (tile < tiles - 1) & (in_group == GROUP - 1):
            tile_re, tile_im = factor_of(G_tile, short(A_tile))
            end_re, end_im = join(tile_re, tile_im, k_re, k_im, re_tile, im_tile)
            angle = (A.to(tl.int64) << 16) + A_tile
            group_re, group_im, lost_re, lost_im = exact_factor_of(G + G_tile, angle)
            end_re, end_im = step(group_re, group_im, lost_re, lost_im, re, im, end_re, end_im, True)
            tl.store(words + BD, word_of(end_re, end_im), mask=inside)
        f_re, f_im = factor_of(G, A)
        re, im = join(f_re, f_im, re, im, k_re, k_im)
    return re, im
