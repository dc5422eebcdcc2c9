"""What the references do with a pack: run its sequences one by one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[slice, Any], tuple[Tensor, Any]]


def run_each(
    run: Run, length: int, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run(tokens, state)` on the whole batch, or on each sequence of a pack with its own row of the state; 0 outside."""
    if cu_seqlens is None:
        return run(slice(None), initial_state)
    cu = cu_seqlens.tolist()
    nothing, empty = run(slice(0, 0), None)  # no token, and still a function of the inputs
    before, behind = (
        nothing.new_zeros(len(nothing), n, *nothing.shape[2:]) for n in (cu[0], length - cu[-1])
    )
    outs, states = [nothing, before], []
    for n, (start, stop) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        out, state = run(slice(start, stop), None if initial_state is None else initial_state[n : n + 1])
        outs.append(out)
        states.append(state)
    return torch.cat([*outs, behind], 1), torch.cat(states) if states else empty[:0]
