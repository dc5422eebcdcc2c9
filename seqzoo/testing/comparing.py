"""Run a mixer two ways, with every gradient, and compare the two by law 8."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from seqzoo import TokenMixer, states
from seqzoo_kernels.precision import EPS_FACTOR, FLOAT64_RELATIVE_ERROR, allowed_error, check_close, largest

from .law import LawViolation, require, violated

State = Any  # a (nested) NamedTuple of tensors
Shared = dict[str, Tensor] | None
Measured = dict[str, Tensor]
NO_MOVES: Mapping[str, float] = MappingProxyType({})
# (mixer, x, state, shared) -> (y, state); a state of None is not compared.
Route = Callable[[TokenMixer, Tensor, State, Shared], tuple[Tensor, State]]


def named_leaves(state: State, name: str = "state") -> dict[str, Tensor]:
    """The tensors of a state, by a dotted name such as "state.conv.tail"."""
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {name: state}
    names = getattr(state, "_fields", range(len(state)))
    return {
        k: v
        for field, part in zip(names, state, strict=True)
        for k, v in named_leaves(part, f"{name}.{field}").items()
    }


def measure(route: Route, mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Measured:
    """Everything a route gives, by name: output, final state, and all gradients of one weighted sum of the two.

    The weights of the sum depend on an element's index alone, so they are the same for caches of different capacity.
    """
    x, state = _variable(x), states.map_state(_variable, state)
    shared = None if shared is None else {name: _variable(v) for name, v in shared.items()}
    inputs = {"x": x, **named_leaves(state), **{f"shared.{name}": v for name, v in (shared or {}).items()}}
    inputs = {name: v for name, v in inputs.items() if v.requires_grad}
    y, final = route(mixer, x, state, shared)
    values = {"y": y, **named_leaves(final)}
    terms = [(weights(v) * v.to(torch.float64)).sum() for v in values.values() if v.requires_grad]
    inputs |= {name: p for name, p in mixer.named_parameters() if p.requires_grad}
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if terms:
        found = torch.autograd.grad(torch.stack(terms).sum(), list(inputs.values()), allow_unused=True)
    gradients = zip(inputs.items(), found, strict=True)
    return {name: v.detach() for name, v in values.items()} | {
        f"gradient of {name}": torch.zeros_like(v) if g is None else g for (name, v), g in gradients
    }


def weights(like: Tensor) -> Tensor:
    """Fixed weights in [-1, 1], a function of the index, exact in every dtype."""
    angle = torch.full((), 0.3, dtype=torch.float64, device=like.device)
    for axis, size in enumerate(like.shape):
        index = torch.arange(size, dtype=torch.float64, device=like.device)
        angle = angle[..., None] + (1.0 + 0.618 * axis) * index
    return torch.cos(angle).to(torch.bfloat16).to(torch.float64)


def compare(
    result: Measured,
    exact: Measured,
    reference: Measured,
    dtype: torch.dtype,
    moves: Mapping[str, float] = NO_MOVES,
) -> None:
    """Each tensor of `result` meets law 8; whole numbers are equal. The worst offender is named.

    A gradient that vanishes beside the others (less than eps of the largest) is a difference of terms as large as they are,
    as the gradient of a log-decay is of q * dq: so is its scale. In float64, where scale has a larger factor than eps, no
    gradient need be exact below the last digit of the largest. `moves` are lower bounds of eps * scale.
    """
    eps = torch.finfo(dtype).eps
    last_digit = EPS_FACTOR * eps / FLOAT64_RELATIVE_ERROR if dtype == torch.float64 else 0.0
    worst: LawViolation | None = None
    others = 0
    scales = {name: largest(v) for name, v in exact.items()}
    top = max((size for name, size in scales.items() if name.startswith("gradient")), default=0.0)
    for name, wanted in exact.items():
        require(name in result, f"{name} is missing.")
        got, wanted, plain = zero_extended(name, result[name], wanted, reference[name])
        scale = max(scales[name], moves.get(name, 0.0) / eps)
        if name.startswith("gradient"):
            scale = max(scale, top if scales[name] < eps * top else last_digit * top)
        try:
            if wanted.is_floating_point():
                check_close(got, wanted, plain, dtype=dtype, name=name, scale=scale)
            else:
                require(torch.equal(got, wanted), f"{name}: expected {wanted.tolist()}, got {got.tolist()}.")
            continue
        except LawViolation as error:
            found = error
        except AssertionError as error:
            found = LawViolation(str(error), **_sizes(got, wanted, plain, dtype, scale))
        others += worst is not None
        if worst is None or _ratio(found) > _ratio(worst):
            worst = found
    if worst is not None:
        more = f" {others} more tensors break it too." if others else ""
        violated(worst.what + more, measured=worst.measured, allowed=worst.allowed)


def with_largest_error(exact: Measured, pairs: Sequence[tuple[Measured, Measured]]) -> Measured:
    """`exact` with, on each tensor, the largest of the errors that `pairs` of (exact, reference) show."""

    def worst(name: str) -> Tensor:
        if not exact[name].is_floating_point():
            return exact[name]
        errors = [plain[name].to(torch.float64) - wanted[name] for wanted, plain in pairs]
        return exact[name] + max(errors, key=largest)

    return {name: worst(name) for name in exact}


def largest_moves(exact: Measured, moved: Sequence[Measured]) -> dict[str, float]:
    """How far each tensor of `exact` is from the same one of `moved`, at most."""
    return {
        name: max(largest(other[name] - wanted) for other in moved)
        for name, wanted in exact.items()
        if wanted.is_floating_point()
    }


def zero_extended(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Caches that hold the same tokens may have different numbers of dead slots, along dim 1, which are zero."""
    if not name.startswith("state") or any(t.dim() < 2 for t in tensors):
        return tensors
    slots = max(t.shape[1] for t in tensors)
    return tuple(
        torch.cat([t, t.new_zeros(t.shape[0], slots - t.shape[1], *t.shape[2:])], 1) for t in tensors
    )


def same_bits(result: Mapping[str, Tensor], expected: Mapping[str, Tensor], why: str) -> None:
    """Every tensor is bitwise the same."""
    for name, wanted in expected.items():
        got, wanted = zero_extended(name, result[name], wanted)
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            violated(f"{name}: {why}: expected {_kind(wanted)}, got {_kind(got)}.")
        if not torch.equal(got, wanted):
            error = (got.double() - wanted.double()).abs().max().item()
            violated(
                f"{name}: {why}: expected the same bits, off by {error:.3g}.", measured=error, allowed=0.0
            )


def _variable(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _sizes(got: Tensor, wanted: Tensor, plain: Tensor, dtype: torch.dtype, scale: float) -> dict[str, float]:
    if got.shape != wanted.shape or wanted.isnan().any() or not plain.isfinite().all():
        return {"measured": torch.inf}
    error = (got.to(torch.float64) - wanted.to(torch.float64)).abs().nan_to_num(torch.inf).max().item()
    return {"measured": error, "allowed": allowed_error(wanted, plain, dtype, scale=scale)}


def _ratio(found: LawViolation) -> float:
    return torch.inf if not found.allowed or found.measured is None else found.measured / found.allowed
