"""The short depthwise convolution in front of many mixers, its last inputs the state."""

from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

BACKENDS = {"torch": eager, "reference": reference}
DEFAULT_CHUNK_SIZE = 512


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of W taps.

        y_t = activation(bias + sum_{l < W} weight[:, W - 1 - l] * x_{t - l})

    Args:
        x: [B, T, D].
        weight: [D, W]; its last tap multiplies x_t.
        bias: [D].
        activation: "silu" or None.
        initial_state: the W - 1 inputs before the first token, oldest first, [B, W - 1, D], [N, W - 1, D] for a pack; 0 by
            default.
        cu_seqlens: a pack: B = 1 and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; tokens outside every
            sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack; this op has no need of it.
        mode: "parallel", "chunked", "recurrent", or "auto". All have the same gradient.
        backend: "torch", "reference" (a plain loop, whatever the mode), or "auto".
        chunk_size: tokens a chunk in the chunked mode.

    Returns:
        (y, final_state): [B, T, D] in x's dtype, and the last W - 1 inputs in the initial state's dtype (x's without one).

    Raises:
        ValueError: a shape, name or mode is not as above.
        TypeError: a dtype is not as above.
    """
    check(x, weight, bias, activation, initial_state, cu_seqlens)
    checks.check_mode("causal_conv1d", mode)
    checks.check_count("causal_conv1d", "chunk_size", chunk_size)
    length = max(x.shape[1], 1)
    size = {"chunked": chunk_size or DEFAULT_CHUNK_SIZE, "recurrent": 1}.get(mode, length)
    name = dispatch.pick("causal_conv1d", backend, BACKENDS)
    args = (x, weight, bias, initial_state, cu_seqlens, activation == "silu", size)
    if name == "reference":
        return reference.forward(*args)
    y, final = _op(*args, name)
    return y, final


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "causal_conv1d"
    for name, tensor in (("x", x), ("weight", weight)):
        checks.check_float(op, name, tensor)
    checks.check_shape(op, "x", x, (None, None, None), "B, T, D")
    width = x.shape[2]
    checks.check_shape(op, "weight", weight, (width, None), "D, W")
    if weight.shape[1] < 1:
        raise ValueError(f"{op}: expected weight of at least one tap, got shape {tuple(weight.shape)}.")
    if bias is not None:
        checks.check_float(op, "bias", bias)
        checks.check_shape(op, "bias", bias, (width,), "D")
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: expected activation to be None or 'silu', got {activation!r}.")
    checks.check_cu_seqlens(op, cu_seqlens, x.shape[0])
    if initial_state is not None:
        checks.check_float(op, "initial_state", initial_state)
        rows, letter = (x.shape[0], "B") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N")
        shape = (rows, weight.shape[1] - 1, width)
        checks.check_shape(op, "initial_state", initial_state, shape, f"{letter}, W - 1, D")


def _fake(x, weight, bias, initial_state, cu_seqlens, silu, chunk_size):  # type: ignore[no-untyped-def]
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = x.dtype if initial_state is None else initial_state.dtype
    return x.new_empty(x.shape), x.new_empty(rows, weight.shape[1] - 1, x.shape[2], dtype=dtype)


_op = TorchOp(
    "causal_conv1d",
    tensors=("Tensor x", "Tensor weight", "Tensor? bias", "Tensor? initial_state", "Tensor? cu_seqlens"),
    options=("bool silu", "SymInt chunk_size"),
    outputs=2,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
