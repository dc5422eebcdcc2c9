"""The laws every mixer obeys, each written once: `LAWS[name](make, **example)` raises `LawViolation` if the mixer breaks it.

A law that says "two ways give the same" is two routes handed to `agree_on`, which compares outputs, states and all gradients.
Every law takes what `draw` takes, such as ``length=33, dtype=torch.float32, seed=1``; most take the `mode` to run in, and how
things lie in memory: `layout`, `gradients` and `poisoned`. Shape letters: B batch, T time, D dim, N sequences of a pack.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import routes
from .agreement import agree_on
from .cases import Case, Make, agree, draw
from .comparing import named_leaves, same_bits
from .law import law, require
from .layouts import owns_storage, placed, poisoned_memory
from .routes import whole


@law
def modes_agree(make: Make, *, mode: str, **drawn: Any) -> None:
    """Every mode gives what the recurrent mode gives, and so does `mode="step"`, one `step` a token."""
    asked = routes.step_by_step if mode == "step" else partial(whole, mode=mode)
    agree_on(make, asked, partial(whole, mode="recurrent"), **drawn)


@law
def splitting(make: Make, *, cuts: Sequence[int], mode: str = "auto", **drawn: Any) -> None:
    """`mixer(cat(a, b), s)` is `mixer(a, s)` and then `mixer(b, s')`, wherever the cuts are."""
    agree_on(make, partial(routes.in_parts, cuts=cuts, mode=mode), whole, **drawn)


@law
def causality(make: Make, *, cut: int, mode: str = "auto", **drawn: Any) -> None:
    """y_t does not depend on x_s for s > t: outputs before the cut, and their gradients, know nothing behind it."""
    with_future = partial(routes.whole_up_to, cut=cut, mode=mode)
    agree_on(make, with_future, partial(routes.only_up_to, cut=cut), **drawn)


@law
def packing(
    make: Make,
    *,
    lengths: Sequence[int],
    tail: int = 0,
    bounded: bool = False,
    mode: str = "auto",
    **drawn: Any,
) -> None:
    """`cu_seqlens` gives what the sequences give one by one, states included; behind the last one y is 0.

    `tail` NaN tokens are behind the last sequence. `bounded`: the call is told `max_seqlen`.
    """
    lengths, total = tuple(lengths), sum(lengths)
    result = agree_on(
        make,
        partial(routes.packed, lengths=lengths, bounded=bounded, mode=mode),
        partial(routes.one_by_one, lengths=lengths),
        batch=1,
        length=total + tail,
        sequences=len(lengths),
        **drawn,
    )
    require(not result["y"][:, total:].any(), "y behind the last sequence is not 0.")


@law
def padding(
    make: Make,
    *,
    mask: Sequence[str] | Tensor,
    mode: str = "auto",
    layout: str = "dense",
    gradients: str = "dense",
    poisoned: bool = False,
    **drawn: Any,
) -> None:
    """`mask` gives what each row gives without its pads; what stands in a pad changes no bit of anything; y is 0 there.

    `mask` is a string a row, such as "1101", or a bool tensor [B, T].
    """
    if isinstance(mask, Tensor):
        mask = ["".join("01"[int(token)] for token in row) for row in mask]
    given, pads = tuple(mask), ~routes.tokens(mask)
    drawn |= {"batch": pads.shape[0], "length": pads.shape[1]}
    masked = partial(routes.masked, mask=given, mode=mode)
    compacted = partial(routes.compacted, mask=given)
    with poisoned_memory(poisoned):
        result = agree_on(make, masked, compacted, layout=layout, gradients=gradients, **drawn)
        for name in ("y", "gradient of x"):
            require(not result[name][pads].any(), f"{name} at a pad is not 0.")
        case = draw(make, **drawn)
        for pad in (0.0, torch.nan):
            other = case.measure(placed(partial(masked, pad=pad), layout, gradients))
            same_bits(other, result, f"with {pad} in the pads")


@law
def rows(make: Make, *, index: Sequence[int], mode: str = "auto", **drawn: Any) -> None:
    """Rows are independent: a call on the rows `index`, in any order, some twice, is those rows of the call on all."""
    index = tuple(index)
    picked_first = partial(routes.picked_first, index=index, mode=mode)
    agree_on(make, picked_first, partial(routes.picked_last, index=index), **drawn)


@law
def state_value(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """A state is a value: a call never changes it, and using it twice gives the same twice; it owns contiguous storage.

    The one exception is asked for by name: `step(..., donate=True)` decodes in place, until its capacity is full; `reserve`
    gives any state the room for it and changes nothing else.
    """
    case = draw(make, **drawn)
    before = {name: v.clone() for name, v in named_leaves(case.state).items()}
    runs = [whole(case.mixer, case.x, case.state, case.shared, mode=mode) for _ in range(2)]
    same_bits(named_leaves(case.state), before, "the call changed the state it was given")
    first, second = ({"y": y, **named_leaves(state)} for y, state in runs)
    same_bits(second, first, "the same call twice")
    if case.x.numel():
        owns_storage(named_leaves(runs[0][1]), {"x": case.x, "y": runs[0][0], **named_leaves(case.state)})
        if mode in ("auto", case.mixer.modes[0]):  # a step is the same in every mode
            _decodes_in_place(case)


@law
def precision(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """max|X - X64| <= 2 max|ref - X64| + 8 eps scale; y has x's dtype; sums over many tokens are kept in float32."""
    result = agree_on(make, partial(whole, mode=mode), whole, **drawn)
    case = draw(make, **drawn)
    require(
        result["y"].dtype == case.x.dtype, f"y: expected x's dtype {case.x.dtype}, got {result['y'].dtype}."
    )
    _accumulates_in_float32(case)


@law
def extremes(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """Tiny and huge tokens side by side (`scale`), no token, no row: law 8 holds and every gradient is finite."""
    for name, value in agree_on(make, partial(whole, mode=mode), whole, **drawn).items():
        require(bool(value.isfinite().all()), f"{name} is not finite.")


def _decodes_in_place(case: Case) -> None:
    mixer, T = case.mixer, case.x.shape[1]
    agree(case, partial(routes.with_room, reserved=False), routes.from_the_start)
    agree(case, partial(routes.with_room, reserved=True), torch.no_grad()(whole))
    _reserves_and_no_more(case)
    if mixer.state_size(2 * T) == mixer.state_size(T):
        return
    _, full = routes.with_room(mixer, case.x, case.state, case.shared, reserved=False)
    try:
        with torch.no_grad():
            routes.step_by_step(mixer, case.x[:, :1], full, case.shared, donate=True)
    except ValueError as error:
        require("capacity" in str(error), f'the error of a full state does not speak of capacity: "{error}"')
    else:
        require(False, "a step into a full state raised no error.")


def _reserves_and_no_more(case: Case) -> None:
    """A state with room is the same state: its kind, its rows and what it holds, and the one given is left as it was."""
    before = {name: v.clone() for name, v in named_leaves(case.state).items()}
    for room in (0, 3):
        roomy = case.mixer.reserve(case.state, room)
        kind, expected = type(roomy).__name__, type(case.state).__name__
        require(kind == expected, f"reserve: expected a state of type {expected}, got {kind}.")
        same_bits(named_leaves(roomy), before, f"reserve(state, {room})")
    same_bits(named_leaves(case.state), before, "reserve changed the state it was given")


def _accumulates_in_float32(case: Case) -> None:
    """A state's element that depends on half of the tokens is a sum; a copy of a token may have the token's dtype."""
    x = case.x.clone().requires_grad_()
    _, final = whole(case.mixer, x, case.state, case.shared)
    for name, value in named_leaves(final).items():
        if not value.is_floating_point() or value.element_size() >= 4 or not value.numel():
            continue
        for element in value.flatten()[:: max(1, value.numel() // 3)]:
            (seen,) = torch.autograd.grad(element, x, retain_graph=True, allow_unused=True)
            count = 0 if seen is None else int(seen.ne(0).any(-1).any(0).sum())
            require(
                2 * count < x.shape[1], f"{name} sums over {count} tokens in {value.dtype}; expected float32."
            )
