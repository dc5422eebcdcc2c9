"""linear_scan on a GPU: shapes, strides and launches; the kernels are in kernels.py."""

from typing import Any

import torch
import triton
from torch import Tensor

from ..packs import locate
from .kernels import backward_kernel, forward_kernel

Optional = Tensor | None
WIDTH = 64  # channels of a tile, two to a thread
GROUP = 8  # tiles that look back together, at least
LONGEST_CHAIN = 64  # groups that wait for each other, above which tiles are larger
# Segments of a tile and steps of a segment, by the bytes of an element, for the forward and the backward pass: short tiles
# first. The fastest that were measured on an H200.
TILES = {
    2: (((4, 16), (8, 32)), ((2, 32), (8, 32))),
    4: (((2, 16), (8, 16)), ((2, 8), (2, 16), (8, 16))),
}


def forward(
    log_decay: Tensor,
    x: Tensor,
    phase: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    reverse: bool,
    mode: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    g, x = _dense(log_decay), _dense(x)
    batch, length, width = x.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = None if initial_state is None else initial_state.float().contiguous()
    final = _ends(state, (rows, width), x, cu_seqlens)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, length)
    pointers = (g, x, state, sequence, out, final)
    _launch(forward_kernel, pointers, x, (g, x), sequence, reverse, mode, state is not None)
    return out, final


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    out: Tensor,
    final: Tensor,
    log_decay: Tensor,
    x: Tensor,
    phase: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    reverse: bool,
    mode: str,
    chunk_size: int,
) -> tuple[Optional, ...]:
    g, dy = _dense(log_decay), _dense(grad_out)
    length = x.shape[1]
    state = None if initial_state is None else initial_state.float().contiguous()
    d_final = grad_final.float().contiguous()
    d_state, dx = _ends(d_final, d_final.shape, x, cu_seqlens), torch.empty_like(out)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, length)
    constant = g.dim() == 1
    if constant:  # a sum over time a tile, added up in float64
        S, L, _, _ = _tiling(x, mode, True)
        dg = x.new_zeros(triton.cdiv(length, S * L), *x.shape[::2], dtype=torch.float32)
    else:
        dg = torch.empty(x.shape, dtype=g.dtype, device=g.device)
    pointers = (g, dy, out, state, d_final, sequence, dg, dx, d_state)
    _launch(backward_kernel, pointers, x, (g, dy), sequence, not reverse, mode, state is not None)
    if constant:
        dg = dg.sum((0, 1), dtype=torch.float64).to(g.dtype)
    return dg, dx, None, None if initial_state is None else d_state.to(initial_state.dtype), None


def _launch(
    kernel: Any,
    pointers: tuple[Optional, ...],
    x: Tensor,
    strided: tuple[Tensor, Tensor],
    sequence: Optional,
    reverse: bool,
    mode: str,
    has_state: bool,
) -> None:
    """`strided` are the first two of the inputs, log_decay and the one that is as large as x."""
    if not x.numel():
        return
    batch, length, width = x.shape
    S, L, BD, group = _tiling(x, mode, kernel is backward_kernel)
    tiles = triton.cdiv(length, S * L)
    columns = batch * triton.cdiv(width, BD)
    # -1 is a word that is not yet written
    words = x.new_full((tiles * columns * BD if tiles > 1 else 1,), -1, dtype=torch.int64)
    g, other = strided
    rows, steps = zip(*[t.stride()[:2] if t.dim() == 3 else (0, 0) for t in (g, other)], strict=True)
    kernel[(tiles * columns,)](
        *[words if p is None else p for p in pointers],
        words,
        length,
        batch,
        tiles,
        *rows,
        width,
        *steps,
        CONSTANT=g.dim() == 1,
        REVERSE=reverse,
        PACKED=sequence is not None,
        HAS_STATE=has_state,
        CHAINED=tiles > 1,
        GROUP=group,
        EXACT=x.dtype == torch.float32,
        S=S,
        L=L,
        BD=BD,
        num_warps=S,
    )


def _tiling(x: Tensor, mode: str, backward: bool) -> tuple[int, int, int, int]:
    """Segments, each a warp; steps of a segment; channels; tiles that look back together."""
    length = x.shape[1]
    if length == 1:
        return 1, 1, 4 * WIDTH, GROUP
    tiles = TILES[x.element_size()][backward]
    if mode == "recurrent":
        return 1, tiles[0][1], WIDTH, GROUP
    for segments, steps in tiles:
        group = max(GROUP, 2 * segments)
        if length <= LONGEST_CHAIN * group * segments * steps:
            break
    return segments, steps, WIDTH, group


def _ends(start: Optional, shape: tuple[int, ...], x: Tensor, cu_seqlens: Optional) -> Tensor:
    """Where the state at the end goes: a row without tokens ends where it starts, of all others the kernel writes it."""
    if cu_seqlens is None and x.numel():
        return x.new_empty(shape, dtype=torch.float32)
    return x.new_zeros(shape, dtype=torch.float32) if start is None else start.clone()


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sequence(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence of each token, -1 where there is none."""
    tokens = locate(cu_seqlens, length)
    return torch.where(tokens.valid, tokens.sequence, -1).to(torch.int32)
