"""The ways to run a mixer that the laws compare: (mixer, x, state, shared) -> (y, state), and what else a way depends on.

A law hands two of them to `agree_on`; the right one is the plain one, which the reference runs.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from seqzoo import TokenMixer, states

from .cases import per_token, row, stack
from .comparing import Shared, State

Result = tuple[Tensor, State]
ALL = slice(None)


def whole(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, mode: str = "auto") -> Result:
    """One call."""
    return mixer(x, state, mode=mode, shared=shared)


def step_by_step(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, **options: Any) -> Result:
    """As a decoder does it: one `step` a token, and a call where there is none."""
    if not x.shape[1]:  # a state that no one touched would have gradients that its mixer never saw
        return whole(mixer, x, state, shared)
    outputs = [torch.zeros_like(x[:, :0])]
    for t, x_t in enumerate(x.unbind(1)):
        given = per_token(mixer, shared, (ALL, t))
        y_t, state = mixer.step(x_t, state, shared=given, **options)
        outputs.append(y_t[:, None].clone())
    return torch.cat(outputs, 1), state


def in_parts(
    mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, cuts: Sequence[int], mode: str
) -> Result:
    """Call after call, the state handed on."""
    outputs = []
    for start, end in pairwise([0, *cuts, x.shape[1]]):
        part = per_token(mixer, shared, (ALL, slice(start, end)))
        y, state = mixer(x[:, start:end], state, mode=mode, shared=part)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def whole_up_to(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, cut: int, mode: str) -> Result:
    """One call, of which only the outputs before the cut are looked at."""
    y, _ = mixer(x, state, mode=mode, shared=shared)
    return y[:, :cut], None


def only_up_to(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, cut: int) -> Result:
    """A call that is given nothing behind the cut."""
    y, _ = mixer(x[:, :cut], state, shared=per_token(mixer, shared, (ALL, slice(cut))))
    return y, None


def packed(
    mixer: TokenMixer,
    x: Tensor,
    state: State,
    shared: Shared,
    *,
    lengths: Sequence[int],
    bounded: bool,
    mode: str,
) -> Result:
    """One call with `cu_seqlens`, NaN behind the last sequence."""
    ends = [0, *accumulate(lengths)]
    cu = torch.tensor(ends, dtype=torch.int32, device=x.device)
    dead = torch.arange(x.shape[1], device=x.device) >= ends[-1]
    most = max(lengths, default=0) if bounded else None
    x = x.masked_fill(dead[:, None], torch.nan)
    return mixer(x, state, mode=mode, cu_seqlens=cu, max_seqlen=most, shared=shared)


def one_by_one(
    mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, lengths: Sequence[int]
) -> Result:
    """The sequences of a pack, a call each; 0 behind the last."""
    ends = [0, *accumulate(lengths)]
    outputs, finals = [], []
    for n, (start, end) in enumerate(pairwise(ends)):
        part = per_token(mixer, shared, (ALL, slice(start, end)))
        y, final = mixer(x[:, start:end], row(state, n), shared=part)
        outputs.append(y)
        finals.append(final)
    return torch.cat([*outputs, torch.zeros_like(x[:, ends[-1] :])], 1), stack(finals, mixer.init_state(0))


def masked(
    mixer: TokenMixer,
    x: Tensor,
    state: State,
    shared: Shared,
    *,
    mask: Sequence[str],
    mode: str,
    pad: float | None = None,
) -> Result:
    """One call with a mask; `pad` stands in the pads, if it is given."""
    here = tokens(mask).to(x.device)
    x = x if pad is None else torch.where(here[..., None], x, pad)
    return mixer(x, state, mode=mode, mask=here, shared=shared)


def compacted(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, mask: Sequence[str]) -> Result:
    """The rows without their pads, a call each; 0 at the pads."""
    outputs, finals = [], []
    for b, here in enumerate(tokens(mask).to(x.device)):
        part = per_token(mixer, shared, (slice(b, b + 1), here))
        y, final = mixer(x[b : b + 1, here], row(state, b), shared=part)
        outputs.append(torch.zeros_like(x[b]).index_copy(0, here.nonzero()[:, 0], y[0]))
        finals.append(final)
    return torch.stack(outputs), stack(finals, mixer.init_state(0))


def picked_first(
    mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, index: Sequence[int], mode: str
) -> Result:
    """A call on some rows."""
    at = torch.tensor(index, dtype=torch.int64, device=x.device)
    return mixer(x[at], states.select(state, at), mode=mode, shared=per_token(mixer, shared, at))


def picked_last(
    mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, index: Sequence[int]
) -> Result:
    """Some rows of a call on all."""
    at = torch.tensor(index, dtype=torch.int64, device=x.device)
    y, final = mixer(x, state, shared=shared)
    return y[at], states.select(final, at)


@torch.no_grad()
def with_room(mixer: TokenMixer, x: Tensor, state: State, shared: Shared, *, reserved: bool) -> Result:
    """Steps in place, in a state that has room: from `init_state`, or from the given one by `reserve`."""
    if reserved:
        state = mixer.reserve(states.map_state(torch.clone, state), x.shape[1])
    else:
        state = mixer.init_state(x.shape[0], capacity=x.shape[1])
    return step_by_step(mixer, x, state, shared, donate=True)


@torch.no_grad()
def from_the_start(mixer: TokenMixer, x: Tensor, state: State, shared: Shared) -> Result:
    """One call without a state."""
    return mixer(x, shared=shared)


def tokens(mask: Sequence[str]) -> Tensor:
    """The bool tensor [B, T] of a mask, a string a row: "1101" has a pad at t = 2."""
    return torch.tensor([[c == "1" for c in row] for row in mask], dtype=torch.bool)
