"""A case of a law: a mixer with weights, tokens and a state that are all drawn from one seed."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import seqzoo_kernels
from seqzoo import TokenMixer, states

from .comparing import Measured, Route, Shared, State, compare, largest_moves, measure, with_largest_error
from .law import LawViolation

Make = Callable[[], TokenMixer]
NEIGHBOURS = 8  # of a case, to see how far its results move when its numbers do


@dataclass(frozen=True)
class Case:
    """What a law tests on. Laws never change it: `measure` copies its tensors."""

    mixer: TokenMixer
    x: Tensor  # [B, T, D]
    state: State  # of batch B, or of batch N for a pack
    shared: Shared

    def measure(self, route: Route) -> Measured:
        """What `route` gives on this case."""
        return measure(route, self.mixer, self.x, self.state, self.shared)

    def in_float64(self) -> "Case":
        """The same numbers in float64."""
        return Case(
            copy.deepcopy(self.mixer).double(),
            self.x.double(),
            states.map_state(_double, self.state),
            None if self.shared is None else {name: v.double() for name, v in self.shared.items()},
        )

    def neighbour(self, seed: int) -> "Case":
        """A case as near as rounding: every number, weights too, moved by a factor of 1 + eps or 1 - eps."""
        generator = torch.Generator().manual_seed(seed)

        def nudge(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

        mixer = copy.deepcopy(self.mixer)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.copy_(nudge(parameter))
        shared = None if self.shared is None else {name: nudge(v) for name, v in self.shared.items()}
        return Case(mixer, nudge(self.x), states.map_state(nudge, self.state), shared)

    def with_length(self, length: int) -> "Case":
        """The same mixer and state with `length` other tokens."""
        x = _normal(torch.Generator().manual_seed(length), self.x.shape[0], length, self.x.shape[2]).to(
            self.x
        )
        return replace(self, x=x)


def draw(
    make: Make,
    *,
    batch: int = 2,
    length: int = 17,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    shared: bool = False,
    history: int = 5,
    sequences: int | None = None,
    scale: float = 1.0,
) -> Case:
    """A case: `batch` rows of `length` tokens, and a state for each row (of each of `sequences` sequences, for a pack).

    Weights are those of `make()`, moved a little, so that no initial zero hides a fault. Tokens are N(0, 1); of each three, the
    first is `scale` times smaller and the third `scale` times larger. The state has seen `history` tokens, up to two less in
    some rows. With `shared`, the mixer gets what it `reads`, in (0, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    mixer = build(make, dtype, seed)
    device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    x = _normal(generator, batch, length, mixer.dim)
    x = x * torch.tensor([1 / scale, 1.0, scale])[torch.arange(length) % 3, None]
    given = None
    if shared:
        given = {
            name: 0.1
            + 0.8
            * torch.rand((batch, length) * (kind == "token") + (mixer.shared_dim(name),), generator=generator)
            for name, kind in type(mixer).reads.items()
        }
        given = {name: v.to(device, dtype) for name, v in given.items()}
    seen = [max(history - row % 3, 0) for row in range(batch if sequences is None else sequences)]
    earlier = _normal(generator, len(seen), history, mixer.dim).to(device, dtype)
    with torch.no_grad():
        runs = [mixer(earlier[row : row + 1, :n])[1] for row, n in enumerate(seen)]
    return Case(mixer, x.to(device, dtype), stack(runs, mixer.init_state(0)), given)


def build(make: Make, dtype: torch.dtype, seed: int) -> TokenMixer:
    """A mixer whose weights are drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = make().to(dtype)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape).to(parameter))
    return mixer


def agree(case: Case, left: Route, right: Route) -> Measured:
    """`left` as it runs meets law 8 with `right` as the plain reference runs it, in float64 and in the case's dtype.

    In a whole mixer terms cancel where no one outside can see them: a norm divides by what may be small, and hides the
    length of what it divides. There one draw of the reference's error may be a lucky one, and rounding is a share of the
    terms, not of their sum. Both show on neighbours of the case, whose every number is moved by one rounding. So where law
    8 fails at first, the reference's error is its largest on the case and its neighbours, and eps * scale is at least as
    large as the move of the float64 result. (Without this the reference itself, on inputs moved so, fails 1 case in 50.) A
    single op has no such grant.
    """
    result = case.measure(left)
    dtype = case.x.dtype
    with seqzoo_kernels.use_backend("reference"):
        exact = case.in_float64().measure(right)
        reference = exact if dtype == torch.float64 else case.measure(right)
        try:
            compare(result, exact, reference, dtype)
        except LawViolation:
            if dtype == torch.float64:
                raise
            near = [case.neighbour(seed) for seed in range(NEIGHBOURS)]
            moved = [neighbour.in_float64().measure(right) for neighbour in near]
            pairs = zip([exact, *moved], [reference, *(n.measure(right) for n in near)], strict=True)
            reference = with_largest_error(exact, list(pairs))
            compare(result, exact, reference, dtype, largest_moves(exact, moved))
    return result


def stack(parts: Sequence[State], empty: State) -> State:
    """One state from several, row after row; a shorter cache gets dead slots, which are zero."""
    if not parts:
        return empty
    if isinstance(parts[0], Tensor):
        slots = max(p.shape[1] for p in parts) if parts[0].dim() > 1 else 0
        return torch.cat([_with_slots(p, slots) for p in parts])
    fields = [stack(field, ()) for field in zip(*parts, strict=True)]
    return type(parts[0])(*fields) if hasattr(parts[0], "_fields") else type(parts[0])(fields)


def row(state: State, index: int) -> State:
    """One row of a state, as a state of batch 1."""
    return states.map_state(lambda t: t[index : index + 1], state)


def per_token(mixer: TokenMixer, shared: Shared, index: Any) -> Shared:
    """`shared`, with what has one entry a token indexed as the tokens are."""
    if shared is None:
        return None
    return {name: v[index] if type(mixer).reads[name] == "token" else v for name, v in shared.items()}


def _with_slots(part: Tensor, slots: int) -> Tensor:
    if part.dim() < 2 or part.shape[1] == slots:
        return part
    return torch.cat([part, part.new_zeros(part.shape[0], slots - part.shape[1], *part.shape[2:])], 1)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)
