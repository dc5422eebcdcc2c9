"""linear_scan on a GPU: shapes, strides and launches; the kernels are in kernels.py."""

from typing import Any

import torch
import triton
from torch import Tensor

from ..packs import locate
from .kernels import backward_kernel, forward_kernel

Optional = Tensor | None


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
    # a row with no token ends where it began; the kernel writes all others
    final = x.new_zeros(rows, width, dtype=torch.float32) if state is None else state.clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, length)
    _launch(
        forward_kernel, (g, x, state, sequence, out, final), x, g, (g, x), reverse, mode, state is not None
    )
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
    d_state, dx = d_final.clone(), torch.empty_like(out)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, length)
    constant = g.dim() == 1
    if constant:  # a sum over time a tile, added up in float64
        S, L, _, _ = _tiling(x, mode)
        dg = x.new_zeros(triton.cdiv(length, S * L), *x.shape[::2], dtype=torch.float32)
    else:
        dg = torch.empty(x.shape, dtype=g.dtype, device=g.device)
    pointers = (g, dy, out, state, d_final, sequence, dg, dx, d_state)
    _launch(backward_kernel, pointers, x, g, (g, dy), not reverse, mode, state is not None)
    if constant:
        dg = dg.sum((0, 1), dtype=torch.float64).to(g.dtype)
    return dg, dx, None, None if initial_state is None else d_state.to(initial_state.dtype), None


def _launch(
    kernel: Any,
    pointers: tuple[Optional, ...],
    x: Tensor,
    g: Tensor,
    strided: tuple[Tensor, Tensor],
    reverse: bool,
    mode: str,
    has_state: bool,
) -> None:
    if not x.numel():
        return
    batch, length, width = x.shape
    S, L, BD, warps = _tiling(x, mode)
    tiles = triton.cdiv(length, S * L)
    columns = batch * triton.cdiv(width, BD)
    carry = x.new_empty(tiles * columns * BD if tiles > 1 else 1, dtype=torch.float32)
    ready = x.new_zeros(1 + tiles * columns if tiles > 1 else 1, dtype=torch.int32)
    sequence = pointers[3] if kernel is forward_kernel else pointers[5]
    kernel[(tiles * columns,)](
        *[ready if p is None else p for p in pointers],
        carry,
        ready,
        length,
        width,
        batch,
        tiles,
        *[s for t in strided for s in (t.stride()[:2] if t.dim() == 3 else (0, 0))],
        CONSTANT=g.dim() == 1,
        REVERSE=reverse,
        PACKED=sequence is not None,
        HAS_STATE=has_state,
        CHAINED=tiles > 1,
        EXACT=x.dtype == torch.float32,
        S=S,
        L=L,
        BD=BD,
        num_warps=warps,
    )


def _tiling(x: Tensor, mode: str) -> tuple[int, int, int, int]:
    """S, L, BD and the warps of a program. One thread loads 16 bytes."""
    batch, length, width = x.shape
    lanes = 16 // x.element_size()
    if length == 1:
        return 1, 1, 32 * lanes, 1
    if mode == "recurrent":
        return 1, 8, 32 * lanes, 1
    # enough columns fill the chip with short tiles, which need few registers; few of them want a short chain of tiles
    return (8, 4, 4 * lanes, 1) if batch * width >= 8192 else (32, 8, 4 * lanes, 4)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sequence(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence of each token, -1 where there is none."""
    tokens = locate(cu_seqlens, length)
    return torch.where(tokens.valid, tokens.sequence, -1).to(torch.int32)
