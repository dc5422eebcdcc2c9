"""linear_scan on a GPU: shapes, strides and launches; the kernels are in kernels.py, and for complex states in rotating.py."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packs import locate
from ..sizes import cdiv
from . import kernels, rotating

Optional = Tensor | None
LONGEST_CHAIN = 64  # groups that wait for each other, above which tiles are larger


class Tile(NamedTuple):
    """What a program has, and how many threads and registers for it."""

    segments: int
    steps: int  # of a segment
    channels: int
    group: int  # tiles that look back together
    warps: int
    registers: int | None = None  # of a thread, at most


# By the bytes of an element, for the forward and the backward pass: short tiles first. The fastest that were measured on an
# H200. For real states, a warp has a segment; for complex ones, a warp has all segments of its channels, and joins them
# without a barrier.
TILES = {
    2: (
        (Tile(4, 16, 64, 8, 4), Tile(8, 32, 64, 16, 8)),
        (Tile(4, 16, 64, 8, 4), Tile(8, 32, 64, 16, 8)),
    ),
    4: (
        (Tile(2, 16, 64, 8, 2), Tile(8, 16, 64, 16, 8)),
        (Tile(2, 8, 64, 8, 2), Tile(2, 16, 64, 8, 2), Tile(8, 16, 64, 16, 8)),
    ),
    8: (
        (Tile(8, 8, 8, 8, 1, 128), Tile(8, 8, 8, 32, 1, 128)),
        (Tile(8, 8, 8, 8, 1, 128), Tile(8, 8, 8, 32, 1, 128)),
    ),
}
ONE_TOKEN = Tile(1, 1, 256, 1, 1)
STEP_BY_STEP = 64  # channels of a program that goes through its row alone


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
    state_dtype = torch.float32 if phase is None else torch.complex64
    g, x = _dense(log_decay), _dense(x)
    batch, length, width = x.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = None if initial_state is None else initial_state.to(state_dtype).contiguous()
    final = _ends(state, (rows, width), x, state_dtype, cu_seqlens)
    out = torch.empty(x.shape, dtype=x.dtype if phase is None else state_dtype, device=x.device)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, length)
    flags = {"REVERSE": reverse, "HAS_STATE": state is not None}
    if phase is None:
        _launch(kernels.forward_kernel, (g, x, state, sequence, out, final), (g, x), x, mode, sequence, flags)
    else:
        phase = _dense(phase)
        pointers = (g, phase, x, state, sequence, out, final)
        flags |= {"STEADY": phase.dim() == 1, "COMPLEX": x.is_complex()}
        _launch(rotating.forward_kernel, pointers, (g, phase, x), x, mode, sequence, flags)
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
    state = None if initial_state is None else initial_state.to(final.dtype).contiguous()
    d_final = grad_final.to(final.dtype).contiguous()
    d_state = _ends(d_final, d_final.shape, x, final.dtype, cu_seqlens)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sequence = None if cu_seqlens is None else _sequence(cu_seqlens, x.shape[1])
    flags = {"REVERSE": not reverse, "HAS_STATE": state is not None}
    dg, dphase = _gradient_of(g, x, mode, phase is not None), None
    pointers: tuple[Optional, ...]
    if phase is None:
        pointers = (g, dy, out, state, d_final, sequence, dg, dx, d_state)
        _launch(kernels.backward_kernel, pointers, (g, dy), x, mode, sequence, flags)
    else:
        phase = _dense(phase)
        dphase = _gradient_of(phase, x, mode, True)
        pointers = (g, phase, dy, out, state, d_final, sequence, dg, dphase, dx, d_state)
        flags |= {"STEADY": phase.dim() == 1, "COMPLEX": x.is_complex()}
        _launch(rotating.backward_kernel, pointers, (g, phase, dy), x, mode, sequence, flags)
        dphase = _summed(dphase, phase)
    if initial_state is None:
        return _summed(dg, g), dx, dphase, None, None
    d_state = d_state if initial_state.is_complex() or phase is None else d_state.real
    return _summed(dg, g), dx, dphase, d_state.to(initial_state.dtype), None


def _gradient_of(value: Tensor, x: Tensor, mode: str, turning: bool) -> Tensor:
    """Where the gradient of a decay or phase goes; that of a constant is a sum over time a tile."""
    if value.dim() == 3:
        return torch.empty(x.shape, dtype=value.dtype, device=x.device)
    tile = _tile_of(x, mode, True, turning)
    shape = (cdiv(x.shape[1], tile.segments * tile.steps), x.shape[0], x.shape[2])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _summed(grad: Tensor, value: Tensor) -> Tensor:
    """The sums of a constant's tiles, added up in float64."""
    return grad if value.dim() == 3 else grad.sum((0, 1), dtype=torch.float64).to(value.dtype)


def _launch(
    kernel: Any,
    pointers: Sequence[Optional],
    strided: Sequence[Tensor],
    x: Tensor,
    mode: str,
    sequence: Optional,
    flags: dict[str, bool],
) -> None:
    """`strided` are those among the inputs that may have strides, log_decay first."""
    if not x.numel():
        return
    batch, length, width = x.shape
    turning = "STEADY" in flags
    backward = kernel in (kernels.backward_kernel, rotating.backward_kernel)
    tile = _tile_of(x, mode, backward, turning)
    tiles = cdiv(length, tile.segments * tile.steps)
    columns = batch * cdiv(width, tile.channels)
    if tiles > 1:  # -1 is a word that is not yet written
        count = tiles * columns * tile.channels * (2 if turning else 1)
        words = torch.full((count,), -1, dtype=torch.int64, device=x.device)
    elif length > 1:
        # not looked at, but of the same type: so a row of one tile needs no other kernel than a row of many
        words = torch.empty(1, dtype=torch.int64, device=x.device)
    else:
        words = strided[0]  # not looked at
    rows, steps = zip(*[t.stride()[:2] if t.dim() == 3 else (0, 0) for t in strided], strict=True)
    aligned = math.gcd(16, *rows, *steps)
    if not turning:
        flags["EXACT"] = x.dtype == torch.float32
    kernel[(tiles * columns,)](
        *[words if p is None else p.view(torch.int64) if p.is_complex() else p for p in pointers],
        words,
        length,
        batch,
        tiles,
        *[row // aligned for row in rows],
        aligned,
        width,
        *steps,
        CONSTANT=strided[0].dim() == 1,
        PACKED=sequence is not None,
        CHAINED=length > 1,
        GROUP=tile.group,
        S=tile.segments,
        L=tile.steps,
        BD=tile.channels,
        **flags,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )


def _tile_of(x: Tensor, mode: str, backward: bool, turning: bool) -> Tile:
    length = x.shape[1]
    if length == 1:
        return ONE_TOKEN
    tiles = TILES[8 if turning else x.element_size()][backward]
    if mode == "recurrent":
        return Tile(1, tiles[0].steps, STEP_BY_STEP, tiles[0].group, 1)
    for tile in tiles:
        if length <= LONGEST_CHAIN * tile.group * tile.segments * tile.steps:
            break
    return tile


def _ends(
    start: Optional, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype, cu_seqlens: Optional
) -> Tensor:
    """Where the state at the end goes: a row without tokens ends where it starts, of all others the kernel writes it."""
    if cu_seqlens is None and x.numel():
        return torch.empty(shape, dtype=dtype, device=x.device)
    return torch.zeros(shape, dtype=dtype, device=x.device) if start is None else start.clone()


def _dense(x: Tensor) -> Tensor:
    x = x.resolve_conj()
    return x if x.stride(-1) == 1 else x.contiguous()


def _sequence(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence of each token, -1 where there is none."""
    tokens = locate(cu_seqlens, length)
    return torch.where(tokens.valid, tokens.sequence, -1).to(torch.int32)
