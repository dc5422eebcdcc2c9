"""A case of a bench: one op on one set of tensors, run in several ways, each judged before it is timed.

The judge is the op in float64 on the same inputs. What is wrong is not timed, and what is absent or refuses gives a row that
says so. A way that wants another layout is given its inputs in that layout: only the op itself is timed. What computes another
function, to show what is usual, is timed and not judged, and says so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import precision
from . import timing

Run = Callable[..., Tensor]
FORWARD, BOTH = "forward", "forward and backward"


def _as_they_are(*inputs: Tensor) -> tuple[Tensor, ...]:
    return inputs


def _as_it_is(out: Tensor) -> Tensor:
    return out


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute a case.

    name     in the table
    load     gives the function, of the arranged inputs to one output; an ImportError says that it is not installed
    arrange  from the case's inputs to those of the function: differentiable and not timed
    restore  from the function's output to the case's
    unlike   it is another function, timed for scale
    forward_only  there is no gradient to be had, or one of another function
    constants  places of the inputs of which there is no gradient, alike before and after `arrange`
    """

    name: str
    load: Callable[[], Run]
    arrange: Callable[..., tuple[Tensor, ...]] = _as_they_are
    restore: Callable[[Tensor], Tensor] = _as_it_is
    unlike: bool = False
    forward_only: bool = False
    constants: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    name     its shape and dtype: unique within the op
    inputs   makes them on a device; those that are floating or complex are differentiated
    ways     the first of them is ours
    exact    the output, of inputs in float64
    floor    bytes that must be read or written: by the forward pass, and by both
    operations  of the products that must be formed, likewise, where they take longer than the bytes
    targets  milliseconds to reach, for the forward pass and for both
    length   T, of a case that is a point of the plot
    cold     whether the cold start is measured, where that is asked for
    large    too large for a CPU, where it is left out
    """

    name: str
    inputs: Callable[[torch.device], Sequence[Tensor]]
    ways: Sequence[Way]
    exact: Run
    floor: tuple[int, int]
    targets: tuple[float | None, float | None] = (None, None)
    length: int | None = None
    cold: bool = False
    operations: tuple[int, int] | None = None
    large: bool = False


def run_case(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """The row: for each way its errors, milliseconds and memory, or why there are none; the floor; the targets."""
    torch.manual_seed(0)
    inputs = [t.detach() for t in case.inputs(device)]
    doubled = [precision.to_float64(t) if _differentiable(t) else t for t in inputs]
    truth, grads, weights = _exact(case, inputs, doubled)
    row: dict[str, Any] = {"case": case.name, "length": case.length, "ways": {}}
    for way in case.ways:
        row["ways"][way.name] = _run_way(way, inputs, weights, truth, grads, repeats)
    row["ways"]["copy of as many bytes"] = {
        name: timing.median(timing.copy(size, device), device, repeats)
        for name, size in zip((FORWARD, BOTH), case.floor, strict=True)
    }
    if case.operations:
        row["ways"]["product of as many operations"] = {
            name: timing.product(count, inputs[0].dtype, device, repeats)
            for name, count in zip((FORWARD, BOTH), case.operations, strict=True)
        }
    row["target"] = {n: t for n, t in zip((FORWARD, BOTH), case.targets, strict=True) if t is not None}
    return row


def _exact(
    case: Case, inputs: Sequence[Tensor], doubled: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output and gradients in float64 of sum(weights * output), and the weights."""
    leaves = [t.requires_grad_() if _differentiable(t) else t for t in doubled]
    out = case.exact(*leaves)
    # small whole numbers, the same in every dtype
    weights = torch.randn_like(out.detach()).mul_(2)
    (torch.view_as_real(weights) if weights.is_complex() else weights).round_()
    grads = torch.autograd.grad(out, [t for t in leaves if _differentiable(t)], weights)
    return out.detach(), [g.detach() for g in grads], weights


def _run_way(
    way: Way,
    inputs: Sequence[Tensor],
    weights: Tensor,
    truth: Tensor,
    grads: Sequence[Tensor],
    repeats: int,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    device = inputs[0].device
    try:
        run = way.load()
        with torch.no_grad():
            own = [t.contiguous() for t in way.arrange(*inputs)]
            if not way.unlike:
                result["error"] = precision.relative_error(way.restore(run(*own)), truth)
        if way.unlike:
            result["why"] = "another function: for scale, not judged"
        elif not precision.worth_timing(result["error"], inputs):
            return {**result, "why": "wrong result"}

        def forward() -> object:
            with torch.no_grad():
                return run(*own)

        result[FORWARD] = timing.median(forward, device, repeats)
        if way.forward_only:
            return result
        if not way.unlike:
            result["error of gradients"] = _gradient_error(way, run, inputs, weights, grads)
            if not precision.worth_timing(result["error of gradients"], inputs):
                return {**result, "why": "wrong gradients"}
        variables = _leaves(own, way)
        wanted = [t for t in variables if t.requires_grad]
        out_grad = torch.randn_like(run(*own))

        def both() -> object:
            return torch.autograd.grad(run(*variables), wanted, out_grad)

        result[BOTH] = timing.median(both, device, repeats)
        result["peak extra MiB"] = timing.peak_memory(both, device)
    except ImportError as error:
        return {**result, "why": f"not installed: {error}"[:200]}
    except Exception as error:  # a peer may refuse in any way it likes
        return {**result, "why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return result


def _gradient_error(
    way: Way, run: Run, inputs: Sequence[Tensor], weights: Tensor, grads: Sequence[Tensor]
) -> float:
    """Of the inputs of which the way has a gradient."""
    leaves = _leaves(inputs, way)
    out = way.restore(run(*way.arrange(*leaves)))
    got = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], weights.to(out.dtype))
    floats = [t for t in leaves if _differentiable(t)]
    exact = [g for t, g in zip(floats, grads, strict=True) if t.requires_grad]
    return max(precision.relative_error(a, b) for a, b in zip(got, exact, strict=True))


def first_calls(case: Case, way_name: str, device: torch.device) -> dict[str, float]:
    """Seconds of the very first forward pass, and of the first with gradients after it; for a fresh process."""
    way = next(way for way in case.ways if way.name == way_name)
    torch.manual_seed(0)
    own = _leaves([t.contiguous() for t in way.arrange(*[t.detach() for t in case.inputs(device)])], way)
    start = timing.now(device)
    run = way.load()
    with torch.no_grad():
        run(*own)
    middle = timing.now(device)
    seconds = {"first forward": middle - start}
    if not way.forward_only:
        out = run(*own)
        torch.autograd.grad(out, [t for t in own if t.requires_grad], torch.ones_like(out))
        seconds["first forward and backward"] = timing.now(device) - middle
    return {name: round(value, 2) for name, value in seconds.items()}


def _leaves(tensors: Sequence[Tensor], way: Way) -> list[Tensor]:
    """The same, with gradients asked of all that have one."""
    return [
        t.detach().requires_grad_(_differentiable(t) and place not in way.constants)
        for place, t in enumerate(tensors)
    ]


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
