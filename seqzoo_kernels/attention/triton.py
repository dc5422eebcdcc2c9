"""attention on a GPU: shapes, tiles and launches; the kernels are in kernels.py, gradients.py and decoding.py."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hopper import padded
from ..sizes import cdiv
from . import decoding
from .gradients import product_kernel, query_kernel
from .kernels import LOG2E, decay_kernel, forward_kernel
from .key_gradients import key_kernel

Optional = Tensor | None


class Tile(NamedTuple):
    """A program's block, the tiles that it goes through, and how it is compiled; BO is a multiple of BI."""

    BO: int
    BI: int
    num_warps: int
    num_stages: int


# The fastest measured on an H200, by the bytes of an element and the head size: "forward", "query" (dq) and "key" (dk, dv).
TILES = {
    (2, 64): {"forward": Tile(64, 64, 4, 3), "query": Tile(64, 64, 4, 2), "key": Tile(64, 64, 4, 1)},
    (2, 128): {"forward": Tile(128, 64, 8, 3), "query": Tile(128, 64, 8, 3), "key": Tile(128, 64, 8, 2)},
    (2, 256): {"forward": Tile(64, 64, 4, 2), "query": Tile(64, 64, 4, 1), "key": Tile(64, 64, 8, 1)},
    (4, 64): {"forward": Tile(64, 32, 4, 2), "query": Tile(32, 32, 4, 2), "key": Tile(32, 32, 4, 1)},
    (4, 128): {"forward": Tile(32, 32, 4, 2), "query": Tile(32, 32, 4, 1), "key": Tile(32, 16, 4, 1)},
    (4, 256): {"forward": Tile(32, 16, 8, 1), "query": Tile(16, 16, 4, 1), "key": Tile(16, 16, 4, 1)},
}
CLOSED = 1e5  # what a gate of -inf counts for in a bound, in units of log 2
ROUNDED_UP = 1 + 2**-7  # a bound of scores whose products are formed in half precision


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
    block: int,
    prune: float,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    out = v.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=torch.float32)
    if not out.numel():
        return out, lse.fill_(torch.inf)
    q, k, v = _dense(q), _dense(k), _dense(v)
    if length == 1:
        decoding.forward(q, k, v, log_decay, bias, query_position, key_position, scale, window, out, lse)
        return out, lse
    call = _Call(q, k, v, log_decay, bias, query_position, key_position, scale, window, prune)
    call.launch(forward_kernel, "forward", (out, lse), ())
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    bias: Optional,
    query_position: Tensor,
    key_position: Tensor,
    scale: float,
    window: int,
    block: int,
    prune: float,
) -> tuple[Optional, ...]:
    batch, length, heads, _ = q.shape
    slots = k.shape[1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    float32: Any = {"dtype": torch.float32, "device": q.device}
    if not out.numel():
        dg = None if log_decay is None else torch.zeros_like(log_decay)
        d_bias = None if bias is None else torch.zeros_like(bias)
        return dq.zero_(), dk.zero_(), dv.zero_(), dg, d_bias, None, None
    q, k, v, do = _dense(q), _dense(k), _dense(v), _dense(grad_out)
    rows = torch.empty(batch, heads, length, **float32) if log_decay is not None else lse
    has_sums = log_decay is not None or bias is not None
    columns = torch.empty(batch, heads, slots, **float32) if has_sums else lse
    call = _Call(q, k, v, log_decay, bias, query_position, key_position, scale, window, prune, lse)
    padded_lse, delta = torch.empty(2, batch * heads, call.padded, **float32).unbind(0)
    blocks = call.padded // call.key_rows
    product_kernel[(blocks * batch * heads,)](
        out,
        do,
        call.added,
        lse,
        padded_lse,
        delta,
        length,
        blocks,
        *do.stride()[:3],
        H=heads,
        V=v.shape[3],
        BV=padded(v.shape[3]),
        BO=call.key_rows,
    )
    call.launch(query_kernel, "query", (do, padded_lse, delta, dq, rows), do.stride()[:3])
    for older in (False, True) if call.older else (False,):
        call.launch(key_kernel, "key", (do, padded_lse, delta, dk, dv, columns), do.stride()[:3], older)
    dg = None
    if log_decay is not None:
        across = (rows - columns[..., call.older :]).double()
        dg = across.flip(-1).cumsum(-1).flip(-1).transpose(1, 2).masked_fill(log_decay == -torch.inf, 0)
        dg = dg.to(log_decay.dtype)
    d_bias = None if bias is None else columns.transpose(1, 2).to(bias.dtype)
    return dq, dk, dv, dg, d_bias, None, None


class _Call:
    """What the launches of a call have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Optional,
        bias: Optional,
        query_position: Tensor,
        key_position: Tensor,
        scale: float,
        window: int,
        prune: float,
        lse: Optional = None,
    ) -> None:
        """`lse`, where it is known: log2 of the sum of each query's weights [B, H, T]."""
        self.q, self.k, self.v = q, k, v
        self.log_decay, self.scale, self.window = log_decay, scale, window
        self.bias = None if bias is None else bias.contiguous()
        self.batch, self.length, self.heads, self.K = q.shape
        self.V, self.groups = v.shape[3], k.shape[2]
        self.older = k.shape[1] - self.length
        self.key_rows = tiling(q, v, "key").BO
        self.padded = cdiv(self.length, self.key_rows) * self.key_rows  # queries, for the kernel for keys
        self.added = (query_position >= 0).sum(1, dtype=torch.int32)
        self.first = query_position[:, 0].contiguous()
        self.position = key_position.contiguous()
        self.decays: dict[
            str, tuple[Tensor, ...]
        ] = {}  # by a launch's name, which both launches for keys have in common
        self.prune = prune
        self.above = _above(q, k, scale, lse) if prune and log_decay is not None else None

    def launch(
        self,
        kernel: Any,
        name: str,
        results: tuple[Tensor, ...],
        strides: tuple[int, ...],
        of_cache: bool = False,
    ) -> None:
        """`of_cache`: the keys are the slots of the cache; `strides` come behind those of q, k and v."""
        tile = tiling(self.q, self.v, name)
        new_blocks = cdiv(self.length, tile.BO)
        blocks = cdiv(self.older, tile.BO) if of_cache else new_blocks
        keys = name == "key"
        if name not in self.decays:
            self.decays[name] = self._decay(tile, new_blocks, keys)
        decay = self.decays[name]
        reach = self._reach(decay, tile, blocks, keys, of_cache)
        kernel[(blocks * self.batch * (self.groups if keys else self.heads),)](
            self.q,
            self.k,
            self.v,
            self.q if self.bias is None else self.bias,
            self.added,
            self.first,
            self.position,
            *decay,
            reach,
            *results,
            self.length,
            self.older,
            self.window,
            blocks,
            *(() if name == "forward" else (self.padded,)),
            self.scale * LOG2E.value,
            *(() if name == "forward" else (self.scale,)),
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.v.stride()[:3],
            *strides,
            H=self.heads,
            R=self.heads // self.groups,
            K=self.K,
            V=self.V,
            BK=padded(self.K),
            BV=padded(self.V),
            BO=tile.BO,
            BI=tile.BI,
            HAS_DECAY=self.log_decay is not None,
            HAS_BIAS=self.bias is not None,
            **{"OLDER": of_cache} if keys else {"HAS_OLDER": self.older > 0},
            HAS_WINDOW=self.window > 0,
            PRUNED=self.above is not None,
            PRECISION="ieee" if self.q.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _decay(self, tile: Tile, blocks: int, keys: bool) -> tuple[Tensor, ...]:
        """high, low, closed, own, inner and total of decay_kernel; some tensor where there is no decay."""
        g = self.log_decay
        if g is None:
            return (self.q,) * 6
        shape = (self.batch * self.heads, blocks * tile.BO)
        high, low, own, inner = torch.empty(4, *shape, dtype=torch.float32, device=g.device).unbind(0)
        closed = torch.empty(shape, dtype=torch.int32, device=g.device)
        total = torch.empty(shape[0], shape[1] // tile.BI, dtype=torch.float64, device=g.device)
        decay_kernel[(shape[0] * blocks,)](
            g,
            high,
            low,
            closed,
            own,
            inner,
            total,
            self.length,
            blocks,
            *g.stride(),
            H=self.heads,
            BO=tile.BO,
            BI=tile.BI,
            QUERIES=not keys,
        )
        return high, low, closed, own, inner, total

    def _reach(
        self, decay: tuple[Tensor, ...], tile: Tile, blocks: int, keys: bool, of_cache: bool
    ) -> Tensor:
        """[B * H, blocks]: of each block of queries the first tile of keys that counts, of keys how many tiles of queries.

        A tile of keys, and all before it, does not count for a query where a bound of their weights is below `prune` together:
        log2 of it is `above` the query's own, less the decay up to the query's tile, plus `behind` in what the decay up to each
        key has left of as many ones. All in float64 and units of log 2.
        """
        if self.above is None:
            return self.added
        step = tile.BO // tile.BI
        total = decay[5].clamp(min=-CLOSED)
        before = F.pad(total.cumsum(1), (1, 0)).neg()  # the decay of the tiles before each, ascending
        ones = torch.full_like(before, math.log(tile.BI))
        ones[:, 0] = math.log(self.older) if self.older else -torch.inf  # the cache is behind all
        behind = (before / LOG2E.value + ones).logcumsumexp(1) * LOG2E.value
        above = F.pad(self.above, (0, total.shape[1] * tile.BI - self.length), value=-torch.inf)
        above = above.flatten(0, 1).double() - math.log2(self.prune)
        each = torch.arange(blocks, device=total.device) * step
        if not keys:
            least = before[:, each] - above.unflatten(1, (-1, tile.BO)).amax(2)
            return torch.searchsorted(behind[:, 1:].contiguous(), least).int()
        furthest = before[:, :-1] - above.unflatten(1, (-1, tile.BI)).amax(2)
        furthest = furthest.flip(1).cummin(1).values.flip(1)  # of this tile of queries and any later one
        begin = torch.zeros_like(each) if of_cache else (each + step).clamp(max=total.shape[1])
        last = torch.searchsorted(furthest, behind[:, begin].contiguous(), right=True)
        return (last - begin).clamp(min=0).int()


def _above(q: Tensor, k: Tensor, scale: float, lse: Optional) -> Tensor:
    """[B, H, T]: how far any key's score may lie above the sum of a query's weights, of which its own is one, both as log2.

    A score is at most |scale| |q_i| max|k_j|; the sum is `lse` where it is known, else at least the query's own weight.
    """
    heads_a_group, new = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    norms = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(1)
    largest = norms.repeat_interleave(heads_a_group, 1)[:, None] * abs(scale)
    bound = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32) * largest * ROUNDED_UP
    if lse is None:
        own = (q.unflatten(2, (-1, heads_a_group)) * k[:, new:, :, None].float()).sum(-1).flatten(2) * scale
        above = ((bound - own) * LOG2E.value).transpose(1, 2)
    else:
        above = (bound * LOG2E.value).transpose(1, 2) - lse
    return above.nan_to_num(torch.inf, torch.inf, -torch.inf)


def tiling(q: Tensor, v: Tensor, name: str) -> Tile:
    size = padded(max(q.shape[-1], v.shape[-1]))
    return TILES[q.element_size(), size][name]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
