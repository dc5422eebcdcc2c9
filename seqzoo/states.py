"""Helpers on states: nested NamedTuples (or tuples) of tensors, batch first. All of them return a new state."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_state(fn: Callable[..., Tensor], state: State, *others: Any) -> State:
    """`fn` of every tensor of a state, and of the tensors at the same places in `others`: a new state of the same kind.

    Raises:
        TypeError: something in the state is neither a tensor nor a tuple. ValueError: `others` are of another shape.
    """
    if isinstance(state, Tensor):
        return fn(state, *others)  # type: ignore[return-value]
    if not isinstance(state, tuple):
        raise TypeError(f"expected a state (a NamedTuple or tuple of tensors), got {type(state).__name__}.")
    parts = [map_state(fn, *items) for items in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)  # type: ignore[return-value]


def leaves(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in order.

    Raises:
        TypeError: something in the state is neither a tensor nor a tuple.
    """
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from leaves(part)
    else:
        raise TypeError(f"expected a state (a NamedTuple or tuple of tensors), got {type(state).__name__}.")


def select(state: State, index: Tensor) -> State:
    """The rows `index` of a state, in that order: int64 [rows], where a row may come more than once, or bool [B].

    Raises:
        TypeError: `index` is of another dtype.
    """
    _check_index("select", index)
    return map_state(lambda t: t[index.to(t.device)], state)


def reorder(state: State, order: Tensor) -> State:
    """The state whose row i is row `order[i]` [B], as beam search asks for.

    Raises:
        TypeError: `order` is of another dtype. ValueError: it has not one entry for each row.
    """
    _check_index("reorder", order)
    rows = next(leaves(state)).shape[0]
    if order.shape != (rows,):
        raise ValueError(
            f"reorder: expected an entry for each of {rows} rows, got shape {tuple(order.shape)}."
        )
    return select(state, order)


def _check_index(name: str, index: Tensor) -> None:
    if index.dtype not in (torch.int64, torch.int32, torch.bool):
        raise TypeError(f"{name}: expected int64 or bool indices, got {index.dtype}.")


def repeat(state: State, times: int) -> State:
    """Each row `times` times, one after the other: [a, b] -> [a, a, b, b].

    Raises:
        ValueError: `times` is negative.
    """
    if times < 0:
        raise ValueError(f"repeat: expected times to be at least 0, got {times}.")
    return map_state(lambda t: t.repeat_interleave(times, 0), state)


def detach(state: State) -> State:
    """The same values without their history: truncated backpropagation through time."""
    return map_state(lambda t: t.detach(), state)
