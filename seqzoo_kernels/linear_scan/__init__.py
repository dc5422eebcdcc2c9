"""The op of diagonal recurrences: HGRU, LRU, minGRU, RG-LRU, S4D, S5, moving averages."""

import torch
from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

BACKENDS = {"triton": dispatch.Later(f"{__name__}.triton"), "torch": eager, "reference": reference}
DEFAULT_CHUNK_SIZE = 256


def linear_scan(
    log_decay: Tensor,
    x: Tensor,
    *,
    phase: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    reverse: bool = False,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """First-order linear recurrence, elementwise over channels, real or complex.

        h_t = e^{log_decay_t + i phase_t} h_{t-1} + x_t

    Args:
        log_decay: real, in [-inf, 0]; [B, T, D], or [D] when it is the same at every t. Computed with in float32 (float64
            for float64 inputs).
        x: [B, T, D], real; complex is allowed with `phase`.
        phase: radians a step, [D] or [B, T, D]; with it the recurrence and its results are complex.
        initial_state: h before the first token, [B, D], [N, D] for a pack; 0 by default.
        cu_seqlens: a pack: x is [1, T, D] and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; tokens outside
            every sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack; this op has no need of it.
        reverse: run from the last token to the first: h_t = e^{...} h_{t+1} + x_t; the final state is then the one at t = 0.
        mode: "parallel" (blocks of time side by side), "chunked" (chunk after chunk), "recurrent" (token after token), or
            "auto". All have the same gradient.
        backend: "triton" (on a GPU, not in float64), "torch", "reference" (a plain loop, whatever the mode), or
            "auto".
        chunk_size: tokens a chunk in the chunked mode.

    Returns:
        (h, final_state): [B, T, D] in x's dtype and [B, D] in float32 (float64 for float64 inputs); with `phase` both complex64
        (complex128).

    Raises:
        ValueError: a shape, mode or backend is not as above.
        TypeError: a dtype is not as above.
    """
    check(log_decay, x, phase, initial_state, cu_seqlens)
    checks.check_mode("linear_scan", mode)
    checks.check_count("linear_scan", "chunk_size", chunk_size)
    if mode == "auto":
        mode = "recurrent" if x.shape[1] == 1 and cu_seqlens is None else "parallel"
    name = dispatch.pick("linear_scan", backend, BACKENDS, {"triton": _no_triton(x)})
    args = (log_decay, x, phase, initial_state, cu_seqlens, reverse, mode, chunk_size or DEFAULT_CHUNK_SIZE)
    if name == "reference":
        return reference.forward(*args)
    out, final = _op(*args, name)
    return out, final


def check(
    log_decay: Tensor,
    x: Tensor,
    phase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "linear_scan"
    checks.check_float(op, "x", x, complex_allowed=phase is not None)
    checks.check_float(op, "log_decay", log_decay)
    checks.check_shape(op, "x", x, (None, None, None), "B, T, D")
    batch, length, width = x.shape
    if log_decay.dim() == 1:
        checks.check_shape(op, "log_decay", log_decay, (width,), "D")
    else:
        checks.check_shape(op, "log_decay", log_decay, (batch, length, width), "B, T, D")
    if phase is not None:
        checks.check_float(op, "phase", phase)
        if phase.dim() == 1:
            checks.check_shape(op, "phase", phase, (width,), "D")
        else:
            checks.check_shape(op, "phase", phase, (batch, length, width), "B, T, D")
    checks.check_cu_seqlens(op, cu_seqlens, batch)
    if initial_state is not None:
        checks.check_float(op, "initial_state", initial_state, complex_allowed=phase is not None)
        rows, letters = (batch, "B, D") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N, D")
        checks.check_shape(op, "initial_state", initial_state, (rows, width), letters)


def _no_triton(x: Tensor) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    if checks.state_dtype(x.dtype) == torch.float64:
        return f"its states are float32, and x is {x.dtype}"
    return dispatch.no_triton(x)


def _fake(log_decay, x, phase, initial_state, cu_seqlens, reverse, mode, chunk_size):  # type: ignore[no-untyped-def]
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = checks.state_dtype(x.dtype)
    state = state if phase is None else state.to_complex()
    return (
        x.new_empty(x.shape, dtype=reference.out_dtype(x, phase)),
        x.new_empty(rows, x.shape[2], dtype=state),
    )


_op = TorchOp(
    "linear_scan",
    tensors=("Tensor log_decay", "Tensor x", "Tensor? phase", "Tensor? initial_state", "Tensor? cu_seqlens"),
    options=("bool reverse", "str mode", "int chunk_size"),
    outputs=2,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
