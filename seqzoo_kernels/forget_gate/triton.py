"""forget_gate on a GPU: layouts and launches; the kernels are in kernels.py."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .kernels import backward_kernel, forward_kernel
from .reference import Optional

TILE = 1024  # elements of a tile, eight side by side to each thread of four warps
WIDTH = 256  # channels of a tile, at most
PROGRAMS = 4096  # of the backward pass, at most: each has sums of its own
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WORDS = {4: torch.int64, 2: torch.int32}


def forward(
    logits: Tensor,
    lower_bound: Optional,
    open_part: Optional,
    x: Optional,
    floor: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    log_f = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    u = torch.empty(logits.shape if x is None else x.shape, dtype=dtype, device=logits.device)
    if not logits.numel():
        return log_f, u
    flags = _flags(logits, lower_bound, open_part, x, floor, silu, dtype)
    pairs, width = flags["PAIRS"], logits.shape[-1]
    z = _rows(logits, width)
    value = z if x is None else _values(x, width, pairs)
    gamma, o = _bounds(lower_bound, open_part, z)
    programs = cdiv(len(z), flags["ROWS"]) * cdiv(width, flags["BD"])
    forward_kernel[(programs,)](
        z, gamma, o, value, log_f, u.view(WORDS[u.element_size()]) if pairs else u, floor, 1 - floor, len(z),
        z.stride(0), value.stride(0), width, **flags,
    )  # fmt: skip
    return log_f, u


def backward(
    grad_log_f: Tensor,
    grad_u: Tensor,
    logits: Tensor,
    lower_bound: Optional,
    open_part: Optional,
    x: Optional,
    floor: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Optional, ...]:
    d_z = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    d_x = None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not logits.numel():
        return d_z, *(None if t is None else torch.zeros_like(t) for t in (lower_bound, open_part)), d_x
    flags = _flags(logits, lower_bound, open_part, x, floor, silu, dtype)
    pairs, width = flags["PAIRS"], logits.shape[-1]
    z, d_log_f = _rows(logits, width), _rows(grad_log_f, width)
    value = z if x is None else _values(x, width, pairs)
    d_u = _values(grad_u, width, pairs)
    gamma, o = _bounds(lower_bound, open_part, z)
    tiles, columns = cdiv(len(z), flags["ROWS"]), cdiv(width, flags["BD"])
    span = cdiv(tiles, max(PROGRAMS // columns, 1))
    programs = cdiv(tiles, span)
    sums = d_z if lower_bound is None else torch.empty(programs, width, device=z.device)
    written = d_z if d_x is None else d_x.view(WORDS[d_x.element_size()]) if pairs else d_x
    backward_kernel[(programs * columns,)](
        d_log_f, d_u, z, gamma, o, value, d_z, written, sums, floor, 1 - floor, len(z), span,
        d_log_f.stride(0), d_u.stride(0), z.stride(0), value.stride(0), width, **flags,
    )  # fmt: skip
    if lower_bound is None:
        return d_z, None, None, d_x
    total = sums.sum(0, dtype=torch.float64)
    if open_part is None:
        return d_z, total.to(lower_bound.dtype), None, d_x
    return d_z, torch.zeros_like(lower_bound), total.neg_().to(open_part.dtype), d_x


def _flags(
    logits: Tensor,
    lower_bound: Optional,
    open_part: Optional,
    x: Optional,
    floor: float,
    silu: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What a kernel is compiled for."""
    width = min(WIDTH, next_power_of_2(logits.shape[-1]))
    return {
        "BOUND": "tensor" if lower_bound is not None else "number" if floor else None,
        "OPEN": open_part is not None,
        "X": None if x is None else TYPES[x.dtype],
        "U": TYPES[dtype],
        "PAIRS": x is not None and x.dim() > logits.dim(),
        "SILU": silu,
        "ROWS": TILE // width,
        "BD": width,
    }


def _bounds(lower_bound: Optional, open_part: Optional, z: Tensor) -> tuple[Tensor, Tensor]:
    """What has no bound is handed another pointer, which it does not read."""
    return z if lower_bound is None else lower_bound.contiguous(), (
        z if open_part is None else open_part.contiguous()
    )


def _rows(x: Tensor, width: int) -> Tensor:
    """[..., D] as [rows, D], its channels side by side: a view wherever rows have one stride, as a chunk's have."""
    flat = x.reshape(-1, width)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _values(x: Tensor, width: int, pairs: bool) -> Tensor:
    """The same of x; of pairs, as words of two numbers each."""
    if not pairs:
        return _rows(x, width)
    flat = _rows(x, 2 * width)
    if flat.storage_offset() % 2 or flat.stride(0) % 2:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(WORDS[flat.element_size()])
