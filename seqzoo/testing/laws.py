"""The laws every mixer obeys, each written once: `LAWS[name](make, **example)` raises `LawViolation` if the mixer breaks it.

A law that says "two ways give the same" is two routes handed to `agree`, which compares outputs, states and all gradients.
Every law takes what `draw` takes, such as ``length=33, dtype=torch.float32, seed=1``, and most take the `mode` to run in.
Shape letters: B batch, T time, D dim, N sequences of a pack.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from seqzoo import TokenMixer, states

from .cases import Case, Make, agree, draw, per_token, row, stack
from .comparing import Shared, State, named_leaves, same_bits
from .law import law, require

Result = tuple[Tensor, State]
ALL = slice(None)


def whole(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, mode: str = "auto") -> Result:
    """The plain route: one call."""
    return mixer(x, state, mode=mode, shared=shared)


def one_step_a_token(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, **options: Any) -> Result:
    """The route of a decoder."""
    outputs = [torch.zeros_like(x[:, :0])]
    for t, x_t in enumerate(x.unbind(1)):
        given = per_token(mixer, shared, (ALL, t))
        y_t, state = mixer.step(x_t, state, shared=given, **options)
        outputs.append(y_t[:, None].clone())
    return torch.cat(outputs, 1), state


@law
def modes_agree(make: Make, *, mode: str, **drawn: Any) -> None:
    """Every mode gives what the recurrent mode gives, and so does `mode="step"`, one `step` a token."""
    asked = one_step_a_token if mode == "step" else partial(whole, mode=mode)
    agree(draw(make, **drawn), asked, partial(whole, mode="recurrent"))


@law
def splitting(make: Make, *, cuts: Sequence[int], mode: str = "auto", **drawn: Any) -> None:
    """`mixer(cat(a, b), s)` is `mixer(a, s)` and then `mixer(b, s')`, wherever the cuts are."""

    def in_parts(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        outputs = []
        for start, end in pairwise([0, *cuts, x.shape[1]]):
            part = per_token(mixer, shared, (ALL, slice(start, end)))
            y, state = mixer(x[:, start:end], state, mode=mode, shared=part)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    agree(draw(make, **drawn), in_parts, whole)


@law
def causality(make: Make, *, cut: int, mode: str = "auto", **drawn: Any) -> None:
    """y_t does not depend on x_s for s > t: outputs before the cut, and their gradients, know nothing behind it."""

    def with_future(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        y, _ = mixer(x, state, mode=mode, shared=shared)
        return y[:, :cut], None

    def without(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        y, _ = mixer(x[:, :cut], state, mode=mode, shared=per_token(mixer, shared, (ALL, slice(cut))))
        return y, None

    agree(draw(make, **drawn), with_future, without)


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
    ends = [0, *accumulate(lengths)]
    total, longest = ends[-1], max(lengths, default=0)

    def packed(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        cu = torch.tensor(ends, dtype=torch.int32, device=x.device)
        x = torch.cat([x[:, :total], torch.full_like(x[:, total:], torch.nan)], 1)
        most = longest if bounded else None
        return mixer(x, state, mode=mode, cu_seqlens=cu, max_seqlen=most, shared=shared)

    def one_by_one(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        outputs, finals = [], []
        for n, (start, end) in enumerate(pairwise(ends)):
            part = per_token(mixer, shared, (ALL, slice(start, end)))
            y, final = mixer(x[:, start:end], row(state, n), mode=mode, shared=part)
            outputs.append(y)
            finals.append(final)
        return torch.cat([*outputs, torch.zeros_like(x[:, total:])], 1), stack(finals, mixer.init_state(0))

    result = agree(
        draw(make, batch=1, length=total + tail, sequences=len(lengths), **drawn), packed, one_by_one
    )
    require(not result["y"][:, total:].any(), "y behind the last sequence is not 0.")


@law
def padding(make: Make, *, mask: Sequence[str] | Tensor, mode: str = "auto", **drawn: Any) -> None:
    """`mask` gives what each row gives without its pads; what stands in a pad changes no bit of anything; y is 0 there.

    `mask` is a string a row, such as "1101", or a bool tensor [B, T].
    """
    if not isinstance(mask, Tensor):
        mask = torch.tensor([[c == "1" for c in row] for row in mask], dtype=torch.bool)
    tokens = mask
    B, T = tokens.shape

    def masked(
        mixer: TokenMixer, x: Tensor, state: State, shared: Shared, pad: float | None = None
    ) -> Result:
        here = tokens.to(x.device)
        x = x if pad is None else torch.where(here[..., None], x, pad)
        return mixer(x, state, mode=mode, mask=here, shared=shared)

    def compacted(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        outputs, finals = [], []
        for b, here in enumerate(tokens.to(x.device)):
            part = per_token(mixer, shared, (slice(b, b + 1), here))
            y, final = mixer(x[b : b + 1, here], row(state, b), mode=mode, shared=part)
            outputs.append(torch.zeros_like(x[b]).index_copy(0, here.nonzero()[:, 0], y[0]))
            finals.append(final)
        return torch.stack(outputs), stack(finals, mixer.init_state(0))

    case = draw(make, batch=B, length=T, **drawn)
    result = agree(case, masked, compacted)
    for name in ("y", "gradient of x"):
        require(not result[name][~tokens].any(), f"{name} at a pad is not 0.")
    for pad in (0.0, torch.nan):
        same_bits(case.measure(partial(masked, pad=pad)), result, f"with {pad} in the pads")


@law
def rows(make: Make, *, index: Sequence[int], mode: str = "auto", **drawn: Any) -> None:
    """Rows are independent: a call on the rows `index`, in any order, some twice, is those rows of the call on all."""

    def picked_first(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        at = torch.tensor(index, dtype=torch.int64, device=x.device)
        picked = per_token(mixer, shared, at)
        return mixer(x[at], states.select(state, at), mode=mode, shared=picked)

    def picked_last(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        at = torch.tensor(index, dtype=torch.int64, device=x.device)
        y, final = mixer(x, state, mode=mode, shared=shared)
        return y[at], states.select(final, at)

    agree(draw(make, **drawn), picked_first, picked_last)


@law
def state_value(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """A state is a value: a call never changes it, and using it twice gives the same twice; it owns contiguous storage.

    The one exception is asked for by name: `step(..., donate=True)` decodes in place, until its capacity is full.
    """
    case = draw(make, **drawn)
    before = {name: v.clone() for name, v in named_leaves(case.state).items()}
    runs = [whole(case.mixer, case.x, case.state, case.shared, mode=mode) for _ in range(2)]
    same_bits(named_leaves(case.state), before, "the call changed the state it was given")
    first, second = ({"y": y, **named_leaves(state)} for y, state in runs)
    same_bits(second, first, "the same call twice")
    if case.x.numel():
        _owns_storage(named_leaves(runs[0][1]), {"x": case.x, "y": runs[0][0], **named_leaves(case.state)})
        _decodes_in_place(case)


@law
def precision(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """max|X - X64| <= 2 max|ref - X64| + 8 eps scale; y has x's dtype; sums over many tokens are kept in float32."""
    case = draw(make, **drawn)
    result = agree(case, partial(whole, mode=mode), whole)
    require(
        result["y"].dtype == case.x.dtype, f"y: expected x's dtype {case.x.dtype}, got {result['y'].dtype}."
    )
    _accumulates_in_float32(case)


@law
def extremes(make: Make, *, mode: str = "auto", **drawn: Any) -> None:
    """Tiny and huge tokens side by side (`scale`), no token, no row: law 8 holds and every gradient is finite."""
    for name, value in agree(draw(make, **drawn), partial(whole, mode=mode), whole).items():
        require(bool(value.isfinite().all()), f"{name} is not finite.")


def _owns_storage(final: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    owners = {v.untyped_storage().data_ptr(): name for name, v in others.items() if v.numel()}
    for name, value in final.items():
        if not value.numel():
            continue
        require(value.is_contiguous(), f"{name}: its strides {value.stride()} are not contiguous.")
        own, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        require(own == held, f"{name}: it has {own} bytes and keeps a storage of {held} alive.")
        owner = owners.setdefault(value.untyped_storage().data_ptr(), name)
        require(owner == name, f"{name}: it shares its storage with {owner}.")


def _decodes_in_place(case: Case) -> None:
    mixer, (B, T, _) = case.mixer, case.x.shape

    @torch.no_grad()
    def in_place(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        return one_step_a_token(mixer, x, mixer.init_state(B, capacity=T), shared, donate=True)

    @torch.no_grad()
    def from_the_start(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
        return mixer(x, shared=shared)

    agree(case, in_place, from_the_start)
    if mixer.state_size(2 * T) == mixer.state_size(T):
        return
    _, full = in_place(mixer, case.x, None, case.shared)
    try:
        with torch.no_grad():
            one_step_a_token(mixer, case.x[:, :1], full, case.shared, donate=True)
    except ValueError as error:
        require("capacity" in str(error), f'the error of a full state does not speak of capacity: "{error}"')
    else:
        require(False, "a step into a full state raised no error.")


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
