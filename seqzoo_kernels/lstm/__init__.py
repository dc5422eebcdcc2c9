"""The op of long short-term memory and its eight variants: a recurrence that is not linear, so one token after another."""

import torch
from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference
from .cells import CELLS, Cell

__all__ = ["CELLS", "Cell", "lstm"]

BACKENDS = {"triton": dispatch.Later(f"{__name__}.triton"), "torch": eager, "reference": reference}
DEFAULT_CHUNK_SIZE = 256
MODES = ("auto", "chunked", "recurrent")


def lstm(
    x: Tensor,
    weight: Tensor,
    peephole: Tensor | None = None,
    *,
    variant: str = "V",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Long short-term memory of n cells, from inputs that are projected already.

        i, f, z, o = x_t + s_{t-1} weight^T        a block of n each, in this order
        i = sigmoid(i + p_i * c_{t-1})    f = sigmoid(f + p_f * c_{t-1})    z = tanh(z)
        c_t = f * c_{t-1} + i * z         o = sigmoid(o + p_o * c_t)        y_t = o * tanh(c_t)

    s is y, and with the variant "FGR" y, i, f and o side by side. A variant without a gate lacks its block.

    Args:
        x: [B, T, G n], G the blocks of the variant; float32 or float64, in which all is computed.
        weight: [G n, n], or [4 n, 4 n] with "FGR".
        peephole: [P, n], a row for each gate of the variant; None is without.
        variant: a key of `CELLS`.
        initial_state: s and c before the first token side by side, [B, 2 n] ([B, 5 n] with "FGR"), of N rows for a pack; 0 by
            default.
        cu_seqlens: a pack: x is [1, T, G n] and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; tokens outside
            every sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack, known to the host: so many steps are made.
        mode: "chunked" (chunk after chunk), "recurrent" (token after token), or "auto".
        backend: "triton" (on a GPU, in float32, not for "FGR"), "torch", "reference" (a plain loop, whatever the mode), or
            "auto".
        chunk_size: tokens a chunk in the chunked mode.

    Returns:
        (y, final_state): [B, T, n], and the state as it is given.

    Raises:
        ValueError: a shape, name or mode is not as above.
        TypeError: a dtype is not as above.
    """
    check(x, weight, peephole, variant, initial_state, cu_seqlens)
    checks.check_mode("lstm", mode, MODES)
    checks.check_count("lstm", "chunk_size", chunk_size)
    size = 1 if mode == "recurrent" else chunk_size or DEFAULT_CHUNK_SIZE
    name = dispatch.pick("lstm", backend, BACKENDS, {"triton": _no_triton(x, variant)})
    args = (x, weight, peephole, initial_state, cu_seqlens, variant, max_seqlen, size)
    if name == "reference":
        return reference.forward(*args)
    y, final, _, _ = _op(*args, name)
    return y, final


def check(
    x: Tensor,
    weight: Tensor,
    peephole: Tensor | None,
    variant: str,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "lstm"
    if variant not in CELLS:
        raise ValueError(f"{op}: expected variant to be one of {', '.join(CELLS)}, got {variant!r}.")
    cell = CELLS[variant]
    checks.check_wide(op, "x", x)
    checks.check_shape(op, "x", x, (None, None, None), "B, T, G n")
    n, rest = divmod(x.shape[2], cell.blocks)
    if rest:
        raise ValueError(f"{op}: expected x of {cell.blocks} blocks of one width, got {tuple(x.shape)}.")
    checks.check_cu_seqlens(op, cu_seqlens, x.shape[0])
    rows, letters = (x.shape[0], "B, S n") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N, S n")
    checks.check_wide(op, "weight", weight, like=x)
    checks.check_shape(op, "weight", weight, (cell.blocks * n, cell.seen * n), "G n, S n")
    if peephole is not None:
        checks.check_wide(op, "peephole", peephole, like=x)
        checks.check_shape(op, "peephole", peephole, (len(cell.gates), n), "P, n")
    if initial_state is not None:
        checks.check_wide(op, "initial_state", initial_state, like=x)
        checks.check_shape(op, "initial_state", initial_state, (rows, (cell.seen + 1) * n), letters)


def _no_triton(x: Tensor, variant: str) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    if x.dtype != torch.float32:
        return f"its states are float32, and x is {x.dtype}"
    if CELLS[variant].feedback:
        return f"it lacks the variant {variant!r}"
    return dispatch.no_triton(x)


def _fake(x, weight, peephole, initial_state, cu_seqlens, variant, max_seqlen, chunk_size):  # type: ignore[no-untyped-def]
    cell = CELLS[variant]
    batch, length, _ = x.shape
    n = weight.shape[0] // cell.blocks
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        x.new_empty(batch, length, n),
        x.new_empty(rows, (cell.seen + 1) * n),
        x.new_empty(length, batch, weight.shape[0]),
        x.new_empty(length, batch, n),
    )


_op = TorchOp(
    "lstm",
    tensors=("Tensor x", "Tensor weight", "Tensor? peephole", "Tensor? initial_state", "Tensor? cu_seqlens"),
    options=("str variant", "SymInt? max_seqlen", "SymInt chunk_size"),
    outputs=4,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
