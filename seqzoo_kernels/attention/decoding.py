"""attention of one query to a cache: its slots are shared out among programs, whose parts a second launch puts together.

A slot's decay is its `bias` and, where the last slot is the query's own, the query's gate: nothing is summed over time. Slots
that the query does not see are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hopper import padded
from ..sizes import cdiv, next_power_of_2
from .kernels import LOG2E, load_rows

Optional = Tensor | None
SLOTS = 32  # a tile
WARPS, STAGES = 4, 5  # positions come two tiles before their keys, and these two before their use
PROGRAMS = 1056  # wanted: eight for each multiprocessor of an H200
MOST_PARTS = 128
_VARYING = ["S", "window", "parts", "each"]


@triton.jit(do_not_specialize=_VARYING)
def part_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    bias_ptr,
    now_ptr,
    position_ptr,
    acc_ptr,
    m_ptr,
    sum_ptr,
    S,
    window,
    parts,
    each,
    scale,
    q_b,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    gate_b,
    gate_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BI: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Maximum, sum and weighted values of a part of the slots, for the R query heads of a key head."""
    pid = tl.program_id(0)
    part, row = pid % parts, (pid // parts).to(tl.int64)
    b, g = row // (H // R), row % (H // R)
    r, tile = tl.arange(0, BR), tl.arange(0, BI)
    h = g * R + r
    now = tl.load(now_ptr + b)
    q = load_rows(q_ptr + b * q_b + g * R * q_h, q_h, r, r < R, K, BK, True)
    gate = tl.zeros([BR], tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + b * gate_b + h * gate_h, mask=r < R, other=0.0).to(tl.float32) * LOG2E
    m = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BV], tl.float32)
    end = tl.minimum((part + 1) * each, S)
    for j0 in range(part * each, end, BI):
        j = j0 + tile
        position = tl.load(position_ptr + b * S + j, mask=j < end, other=-1)
        see = (position >= 0) & (position <= now)
        if HAS_WINDOW:
            see = see & (now - position < window)
        k = load_rows(k_ptr + b * k_b + g * k_h + tl.cast(j0, tl.int64) * k_t, k_t, tile, see, K, BK, True)
        v = load_rows(v_ptr + b * v_b + g * v_h + tl.cast(j0, tl.int64) * v_t, v_t, tile, see, V, BV, True)
        x = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if HAS_BIAS:
            at = bias_ptr + (b * S + j)[None, :] * H + h[:, None]
            x += tl.load(at, mask=see[None, :] & (r < R)[:, None], other=0.0).to(tl.float32) * LOG2E
        if HAS_GATE:
            x += tl.where(j < S - 1, gate[:, None], 0.0)
        x = tl.where(see[None, :], x, float("-inf"))
        highest = tl.maximum(m, tl.max(x, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(x - base[:, None]), tl.exp2(m - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = highest
    at = (b * H + h) * parts + part
    tl.store(m_ptr + at, m, mask=r < R)
    tl.store(sum_ptr + at, total, mask=r < R)
    column = tl.arange(0, BV)
    tl.store(acc_ptr + at[:, None] * V + column[None, :], acc, mask=(r < R)[:, None] & (column < V)[None, :])


@triton.jit(do_not_specialize=["parts"])
def whole_kernel(
    acc_ptr,
    m_ptr,
    sum_ptr,
    out_ptr,
    lse_ptr,
    parts,
    V: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,
):
    """The parts of a head together."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, BP), tl.arange(0, BV)
    m = tl.load(m_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    highest = tl.max(m, 0)
    share = tl.exp2(m - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(share * tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0.0), 0)
    at = acc_ptr + (row * parts + part)[:, None] * V + column[None, :]
    acc = tl.load(at, mask=(part < parts)[:, None] & (column < V)[None, :], other=0.0)
    total = tl.where(total > 0, total, 1.0)
    out = tl.sum(acc * share[:, None], 0) / total
    tl.store(out_ptr + row * V + column, out.to(out_ptr.dtype.element_ty), mask=column < V)
    seen = highest > float("-inf")
    tl.store(lse_ptr + row, tl.where(seen, highest + tl.log2(total), float("inf")))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    bias: Optional,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Writes `out` [B, 1, H, V] and `lse` [B, H, 1]."""
    batch, _, heads, K = q.shape
    slots, groups, V = k.shape[1], k.shape[2], v.shape[3]
    tiles = cdiv(slots, SLOTS)
    parts = max(1, min(tiles, MOST_PARTS, cdiv(PROGRAMS, batch * groups)))
    each = cdiv(tiles, parts) * SLOTS
    acc = torch.empty(batch, heads, parts, V, dtype=torch.float32, device=q.device)
    m, total = torch.empty(2, batch, heads, parts, dtype=torch.float32, device=q.device).unbind(0)
    part_kernel[(parts * batch * groups,)](
        q,
        k,
        v,
        q if log_decay is None else log_decay,
        q if bias is None else bias.contiguous(),
        query_position.contiguous(),
        key_position.contiguous(),
        acc,
        m,
        total,
        slots,
        window,
        parts,
        each,
        scale * LOG2E.value,
        q.stride(0),
        q.stride(2),
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0) if log_decay is None else log_decay.stride()[::2]),
        H=heads,
        R=heads // groups,
        K=K,
        V=V,
        BR=max(16, next_power_of_2(heads // groups)),
        BK=padded(K),
        BV=padded(V),
        BI=SLOTS,
        HAS_GATE=log_decay is not None,
        HAS_BIAS=bias is not None,
        HAS_WINDOW=window > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=STAGES if q.element_size() == 2 and max(K, V) <= 128 else 1,
    )
    whole_kernel[(batch * heads,)](
        acc,
        m,
        total,
        out,
        lse,
        parts,
        V=V,
        BV=next_power_of_2(V),
        BP=next_power_of_2(parts),
        num_warps=4,
    )
