"""Where tensors lie in memory: strided among NaN, expanded, fresh memory full of NaN. The numbers are the same for all."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqzoo import TokenMixer, states

from .comparing import Route, Shared, State
from .law import require

LAYOUTS = ("dense", "strided")  # of inputs
GRADIENTS = ("dense", "strided", "expanded")  # of what comes back to the outputs


@contextmanager
def poisoned_memory(poisoned: bool = True) -> Iterator[None]:
    """`torch.empty` and its kin come filled with NaN (whole numbers: the largest), so that unwritten memory shows.

    PyTorch does this itself in its deterministic mode. `poisoned=False` leaves memory as it comes.
    """
    settings: Any = torch.utils.deterministic
    fill, strict = settings.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    if not poisoned:
        yield
        return
    try:
        settings.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=only_warn)
        settings.fill_uninitialized_memory = fill


def strided(tensor: Tensor) -> Tensor:
    """The same values, its first two axes in the other order in memory and a NaN beside each number. Differentiable."""
    turned = tensor.transpose(0, 1) if tensor.dim() > 2 else tensor
    among_nan = torch.stack([turned, torch.full_like(turned, torch.nan)], -1)[..., 0]
    return among_nan.transpose(0, 1) if tensor.dim() > 2 else among_nan


def placed(route: Route, layout: str = "dense", gradients: str = "dense") -> Route:
    """The route, its inputs and what comes back to its outputs laid out so in memory.

    Expanded gradients are those of a sum over all tokens, as in `y.sum().backward()`: y itself then has no other.
    """
    _known("layout", layout, LAYOUTS)
    _known("gradients", gradients, GRADIENTS)

    def run(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> tuple[Tensor, Any]:
        if layout == "strided":
            x = strided(x)
            shared = None if shared is None else {name: strided(v) for name, v in shared.items()}
        y, final = route(mixer, x, state, shared)
        if gradients == "strided":
            y = _WithStridedGradient.apply(y)
            final = None if final is None else states.map_state(_WithStridedGradient.apply, final)
        if gradients == "expanded":
            return y.detach(), (final, y.sum((0, 1)))
        return y, final

    return run


def owns_storage(final: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Each tensor of a state is contiguous, keeps nothing else alive, and shares its memory with no other."""
    owners = {v.untyped_storage().data_ptr(): name for name, v in others.items() if v.numel()}
    for name, value in final.items():
        if not value.numel():
            continue
        require(value.is_contiguous(), f"{name}: its strides {value.stride()} are not contiguous.")
        own, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        require(own == held, f"{name}: it has {own} bytes and keeps a storage of {held} alive.")
        owner = owners.setdefault(value.untyped_storage().data_ptr(), name)
        require(owner == name, f"{name}: it shares its storage with {owner}.")


class _WithStridedGradient(torch.autograd.Function):
    """The identity, whose gradient comes strided; whole numbers have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return strided(gradient)


def _known(name: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise ValueError(f"expected {name} to be one of {', '.join(values)}, got {value!r}.")
