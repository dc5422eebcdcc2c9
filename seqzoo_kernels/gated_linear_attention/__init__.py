"""The op of matrix-state recurrences: GLA, HGRN2, RetNet, Mamba-2, linear attention."""

import torch
from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

BACKENDS = {"triton": dispatch.Later(f"{__name__}.triton"), "torch": eager, "reference": reference}
WIDEST_HEAD = 512  # K and V that the Triton kernels are made for


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    reverse: bool = False,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention over a decaying matrix state.

        S_t = diag(e^{log_decay_t}) S_{t-1} + k_t v_t^T        o_t = scale * q_t S_t

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K] with H a multiple of G: query head h reads group h // (H // G).
        v: [B, T, G, V].
        log_decay: in [-inf, 0]; per key channel [B, T, G, K], per head [B, T, G], constant per head [G], or None for no decay.
            Computed with in float32 (float64 for float64 inputs).
        scale: of the queries; K ** -0.5 by default.
        initial_state: S before the first token, [B, G, K, V], [N, G, K, V] for a pack; 0 by default.
        cu_seqlens: a pack: B = 1 and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; tokens outside every
            sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack; this op has no need of it.
        reverse: run from the last token to the first: S_t = diag(e^{log_decay_t}) S_{t+1} + k_t v_t^T. `initial_state` is then
            S after the last token of each sequence, and the final state the one at its first. It costs a copy, turned round in
            time, of q, k, v, o and any log-decay with T, and one of each of their gradients.
        mode: "parallel" (one chunk: time and memory T^2), "chunked", "recurrent" (token by token), or "auto": recurrent for one
            token and else chunked. All have the same gradient.
        backend: "triton" (a GPU's: chunked and recurrent, K and V up to 512, not in float64), "torch" (every mode, on any
            device), "reference" (a plain loop, whatever the mode), or "auto", the first of these that serves the call. On a GPU
            too that is "torch", and no warning tells of it, for the parallel mode, for float64, and for K or V above 512; it is
            much slower there than "triton". On a GPU float32 products are as exact as float32, unless
            `torch.set_float32_matmul_precision` allows TF32.
        chunk_size: tokens a chunk, rounded up to a power of 2; "triton" has chunks of 16 to 64.

    Returns:
        (o, final_state): [B, T, H, V] in v's dtype and [B, G, K, V] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape, mode or backend is not as above.
        TypeError: a dtype is not as above.

    Source: the chunked form is that of Yang et al. 2023, arXiv:2312.06635, with every exponent a sum of gates.
    """
    check(q, k, v, log_decay, initial_state, cu_seqlens)
    checks.check_mode("gated_linear_attention", mode)
    checks.check_count("gated_linear_attention", "chunk_size", chunk_size)
    if mode == "auto":
        mode = "recurrent" if q.shape[1] == 1 and cu_seqlens is None else "chunked"
    q, k, v = checks.autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = dispatch.pick("gated_linear_attention", backend, BACKENDS, {"triton": _no_triton(q, v, mode)})
    tensors = (q, k, v, log_decay, initial_state, cu_seqlens)
    options = (float(scale), mode, chunk_size or 0)
    if name == "reference":
        return reference.forward(*tensors, *options, reverse)
    if not reverse:
        out, final = _op(*tensors, *options, name)
        return out, final
    out, final = _op(*_turned(*tensors), *options, name)
    return out.flip(1), final if cu_seqlens is None else final.flip(0)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "gated_linear_attention"
    batch, length, groups, width = checks.check_heads(op, q, k, v)
    if log_decay is not None:
        checks.check_float(op, "log_decay", log_decay)
        shapes = {
            1: ((groups,), "G"),
            3: ((batch, length, groups), "B, T, G"),
            4: ((batch, length, groups, width), "B, T, G, K"),
        }
        checks.check_shape(op, "log_decay", log_decay, *shapes.get(log_decay.dim(), shapes[4]))
    checks.check_cu_seqlens(op, cu_seqlens, batch)
    if initial_state is not None:
        checks.check_float(op, "initial_state", initial_state)
        rows, letter = (batch, "B") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N")
        shape = (rows, groups, width, v.shape[3])
        checks.check_shape(op, "initial_state", initial_state, shape, f"{letter}, G, K, V")


def _turned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """A call with the last token first, and with it a pack's last sequence and its state."""
    if log_decay is not None and log_decay.dim() > 1:
        log_decay = log_decay.flip(1)
    if cu_seqlens is not None:
        cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    return q.flip(1), k.flip(1), v.flip(1), log_decay, initial_state, cu_seqlens


def _no_triton(q: Tensor, v: Tensor, mode: str) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    if q.dtype == torch.float64:
        return "its states are float32, and q is float64"
    if max(q.shape[3], v.shape[3]) > WIDEST_HEAD:
        return f"it has heads up to a width of {WIDEST_HEAD}, and K = {q.shape[3]}, V = {v.shape[3]}"
    if mode == "parallel":
        return "it has the modes 'chunked' and 'recurrent', and mode is 'parallel'"
    return dispatch.no_triton(q)


def _fake(q, k, v, log_decay, initial_state, cu_seqlens, scale, mode, chunk_size):  # type: ignore[no-untyped-def]
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = v.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(rows, k.shape[2], k.shape[3], v.shape[3], dtype=checks.state_dtype(q.dtype))


_op = TorchOp(
    "gated_linear_attention",
    tensors=(
        "Tensor q",
        "Tensor k",
        "Tensor v",
        "Tensor? log_decay",
        "Tensor? initial_state",
        "Tensor? cu_seqlens",
    ),
    options=("float scale", "str mode", "int chunk_size"),
    outputs=2,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
