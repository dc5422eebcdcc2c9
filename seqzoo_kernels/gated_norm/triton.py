"""gated_norm on a GPU: rows and launches; the kernels are in kernels.py."""

import torch
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .kernels import backward_kernel, forward_kernel
from .reference import real_shape

Optional = Tensor | None
TILE = 2048  # features of a program, in several rows where they are narrow
NARROWEST = 16
EACH = {"forward": 16, "backward": 8}  # features of a thread, at first
WARPS = (4, 16)  # at least and at most
STAGES = 2  # of backward's loop: the rows after those that it computes with are on their way
PROGRAMS = (
    512  # of backward, each with one part of the sums: a constant, so that no result depends on the GPU
)


def forward(
    h: Tensor,
    gate: Optional,
    weight: Optional,
    bias: Optional,
    norm: str,
    eps: float,
    act: str | None,
    position: str,
    dtype: torch.dtype,
) -> tuple[Tensor]:
    y = torch.empty(real_shape(h), dtype=dtype, device=h.device)
    if not y.numel():
        return (y,)
    width = y.shape[-1]
    turns, x = h.is_complex(), _rows(h, width)
    g = None if gate is None else _rows(gate, width)
    tile, warps = _tile(width, "forward")
    forward_kernel[(cdiv(len(x), tile["ROWS"]),)](
        x, g, _dense(weight), _dense(bias), y, len(x), x.stride(0), 0 if g is None else g.stride(0), eps,
        N=width, CENTRED=norm == "layer", ACT=act, POST=position == "post_gate", TURNS=turns, **tile, num_warps=warps,
    )  # fmt: skip
    return (y,)


def backward(
    grad: Tensor,
    y: Tensor,
    h: Tensor,
    gate: Optional,
    weight: Optional,
    bias: Optional,
    norm: str,
    eps: float,
    act: str | None,
    position: str,
    dtype: torch.dtype,
) -> tuple[Optional, ...]:
    """z is computed again from h rather than kept."""
    dh, dg = (None if t is None else torch.empty(t.shape, dtype=t.dtype, device=h.device) for t in (h, gate))
    parameters = [t for t in (weight, bias) if t is not None]
    if not y.numel():
        return dh, dg, *(None if t is None else torch.zeros_like(t) for t in (weight, bias))
    assert dh is not None
    width = y.shape[-1]
    turns, dy, x = h.is_complex(), _rows(grad, width), _rows(h, width)
    g = None if gate is None else _rows(gate, width)
    tile, warps = _tile(width, "backward")
    programs = cdiv(len(x), tile["ROWS"])
    programs = min(programs, PROGRAMS) if parameters else programs
    sums = torch.empty(len(parameters), programs, width, dtype=torch.float32, device=h.device)
    parts = iter(sums)
    d_weight, d_bias = (None if t is None else next(parts) for t in (weight, bias))
    backward_kernel[(programs,)](
        dy, x, g, _dense(weight), _dense(bias), torch.view_as_real(dh) if turns else dh, dg, d_weight, d_bias,
        len(x), dy.stride(0), x.stride(0), 0 if g is None else g.stride(0), eps,
        N=width, CENTRED=norm == "layer", ACT=act, POST=position == "post_gate", TURNS=turns, **tile,
        STAGES=STAGES if parameters else 1, num_warps=warps,
    )  # fmt: skip
    whole = iter(sums.sum(1, dtype=torch.float64)) if parameters else iter(())
    return dh, dg, *(None if t is None else next(whole).to(t.dtype) for t in (weight, bias))


def _tile(width: int, kernel: str) -> tuple[dict[str, int], int]:
    """ROWS and BLOCK of a program, and its warps."""
    block = max(NARROWEST, next_power_of_2(width))
    tile = {"ROWS": max(1, TILE // block), "BLOCK": block}
    least, most = WARPS
    return tile, min(most, max(least, max(TILE, block) // (32 * EACH[kernel])))


def _rows(x: Tensor, width: int) -> Tensor:
    """[R, N], without a copy where its features lie side by side; of complex numbers both parts in turns."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.reshape(-1, width)
    return x if x.stride(1) == 1 else x.contiguous()


def _dense(parameter: Optional) -> Optional:
    return None if parameter is None else parameter.contiguous()
