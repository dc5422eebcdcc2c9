"""lstm on a GPU: a step is a product and one kernel, which does what takes the torch backend up to nine launches."""

from functools import partial
from typing import Any

from torch import Tensor

from ..sizes import cdiv
from . import eager
from .cells import Cell
from .kernels import backward_kernel, forward_kernel

BLOCK = 128


def _walk(cell: Cell, gates: Tensor, y: Tensor, c: Tensor, weight: Tensor, peephole: Tensor | None) -> None:
    launch = _launcher(forward_kernel, cell, c, peephole)
    pointers = gates, y, c, c if peephole is None else peephole.contiguous()
    steps, states = gates.unbind(), y.unbind()
    for t in range(len(steps)):
        steps[t].addmm_(states[t], weight)
        launch(*pointers, t, c[0].numel())


def _walk_back(
    cell: Cell,
    d: Tensor,
    dy: Tensor,
    dc: Tensor,
    gates: Tensor,
    c: Tensor,
    weight: Tensor,
    peephole: Tensor | None,
) -> None:
    launch = _launcher(backward_kernel, cell, c, peephole)
    pointers = d, dy, dc, gates.contiguous(), c, c if peephole is None else peephole.contiguous()
    steps, states = d.unbind(), dy.unbind()
    weight = weight.T.contiguous().T  # the layout in which a product adds up most exactly
    for t in reversed(range(len(steps))):
        launch(*pointers, t, c[0].numel())
        states[t].addmm_(steps[t], weight)


def _launcher(kernel: Any, cell: Cell, c: Tensor, peephole: Tensor | None) -> Any:
    i, f, z, o = (-1 if (place := cell.place(name)) is None else place for name in "ifzo")
    return partial(
        kernel[(cdiv(c[0].numel(), BLOCK),)],
        n=c.shape[-1], I=i, F=f, Z=z, O=o, G=cell.blocks, COUPLED=cell.coupled, INPUT_TANH=cell.input_tanh,
        OUTPUT_TANH=cell.output_tanh, PEEPHOLES=peephole is not None, BLOCK=BLOCK,
    )  # fmt: skip


forward = partial(eager.forward, walk=_walk)
backward = partial(eager.backward, walk_back=_walk_back)
