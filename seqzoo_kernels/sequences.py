"""What the references do with a pack: run its sequences one by one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[slice, Any], tuple[Tensor, Any]]


def run_each(
    run: Run, length: int, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run(tokens, state)` on the whole batch, or on each sequence of a pack with its own row of the state."""
    if cu_seqlens is None:
        return run(slice(None), initial_state)
    cu = cu_seqlens.tolist()
    outs, states = [run(slice(0, cu[0]), None)[0] * 0], []
    for n, (start, stop) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        out, state = run(slice(start, stop), None if initial_state is None else initial_state[n : n + 1])
        outs.append(out)
        states.append(state)
    last, empty = run(slice(cu[-1], cu[-1]), None)
    outs.append(last.new_zeros(last.shape[0], length - cu[-1], *last.shape[2:]))
    return torch.cat(outs, 1), torch.cat(states) if states else empty[:0]
