"""attention on a GPU: shapes, tiles and launches; the kernels are in kernels.py, gradients.py and decoding.py."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..hopper import padded
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
PRODUCT_ROWS = 64


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
    delta = torch.empty(batch, heads, length, **float32)
    rows = torch.empty(batch, heads, length, **float32) if log_decay is not None else delta
    has_sums = log_decay is not None or bias is not None
    columns = torch.empty(batch, heads, slots, **float32) if has_sums else delta
    call = _Call(q, k, v, log_decay, bias, query_position, key_position, scale, window, prune)
    blocks = triton.cdiv(length, PRODUCT_ROWS)
    product_kernel[(blocks * batch * heads,)](
        out,
        do,
        call.added,
        delta,
        length,
        blocks,
        *do.stride()[:3],
        H=heads,
        V=v.shape[3],
        BV=padded(v.shape[3]),
        BO=PRODUCT_ROWS,
    )
    call.launch(query_kernel, "query", (do, lse, delta, dq, rows), do.stride()[:3])
    for older in (False, True) if call.older else (False,):
        call.launch(key_kernel, "key", (do, lse, delta, dk, dv, columns), do.stride()[:3], older)
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
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.log_decay, self.scale, self.window = log_decay, scale, window
        self.bias = None if bias is None else bias.contiguous()
        self.batch, self.length, self.heads, self.K = q.shape
        self.V, self.groups = v.shape[3], k.shape[2]
        self.older = k.shape[1] - self.length
        self.added = (query_position >= 0).sum(1, dtype=torch.int32)
        self.first = query_position[:, 0].contiguous()
        self.position = key_position.contiguous()
        self.decays: dict[
            str, tuple[Tensor, ...]
        ] = {}  # by a launch's name, which both launches for keys have in common
        self.furthest = _furthest(q, k, scale, prune) if prune and log_decay is not None else None

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
        new_blocks = triton.cdiv(self.length, tile.BO)
        blocks = triton.cdiv(self.older, tile.BO) if of_cache else new_blocks
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
            *((new_blocks * tile.BO,) if keys else ()),
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
            PRUNED=self.furthest is not None,
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
        """[B * H, blocks]: of each block of queries the first tile of keys that counts, of keys how many tiles of queries."""
        if self.furthest is None:
            return self.added
        total = decay[5]
        before = torch.nn.functional.pad(total.cumsum(1), (1, 0)).neg()  # of the tiles before each, ascending
        each = torch.arange(blocks, device=total.device) * (tile.BO // tile.BI)
        limit = self.furthest.flatten()[:, None]
        if not keys:  # tile n counts where before[block] - before[n + 1] <= limit
            return torch.searchsorted(before[:, 1:].contiguous(), before[:, each] - limit).int()
        begin = torch.zeros_like(each) if of_cache else (each + tile.BO // tile.BI).clamp(max=total.shape[1])
        last = torch.searchsorted(before[:, :-1].contiguous(), before[:, begin] + limit, right=True)
        return (last - begin).clamp(min=0).int()


def _furthest(q: Tensor, k: Tensor, scale: float, prune: float) -> Tensor:
    """[B, H]: the decay, in units of log 2 and positive, behind which all keys of a query together weigh less than `prune`.

    A query sees itself, so a key weighs at most e^{x - x_self}: where |x| <= U at most e^{2 U - decay}; there are S.
    """
    largest_q = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32).amax(1)
    largest_k = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(1)
    bound = largest_q * largest_k.repeat_interleave(q.shape[2] // k.shape[2], 1) * abs(scale)
    return (2 * bound + math.log(k.shape[1]) - math.log(prune)).double() * LOG2E.value


def tiling(q: Tensor, v: Tensor, name: str) -> Tile:
    size = padded(max(q.shape[-1], v.shape[-1]))
    return TILES[q.element_size(), size][name]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
