"""The op of the gated recurrent unit: a recurrence that is not linear, so one token after another."""

from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

BACKENDS = {"torch": eager, "reference": reference}
DEFAULT_CHUNK_SIZE = 256
MODES = ("auto", "chunked", "recurrent")


def gru(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated recurrent unit of n cells, from inputs that are projected already.

        x_t = r', z', h'        weight^T = R_r, R_z, R_h        a block of n each, in this order
        r = sigmoid(r' + h_{t-1} R_r)                z = sigmoid(z' + h_{t-1} R_z)
        h_t = z * h_{t-1} + (1 - z) * tanh(h' + r * (h_{t-1} R_h + bias))

    Args:
        x: [B, T, 3 n]; float32 or float64, in which all is computed.
        weight: [3 n, n].
        bias: [n], of what the reset gate r scales.
        initial_state: h before the first token, [B, n], [N, n] for a pack; 0 by default.
        cu_seqlens: a pack: x is [1, T, 3 n] and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; tokens outside
            every sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack, known to the host: so many steps are made.
        mode: "chunked" (chunk after chunk), "recurrent" (token after token), or "auto".
        backend: "torch", "reference" (a plain loop, whatever the mode), or "auto".
        chunk_size: tokens a chunk in the chunked mode.

    Returns:
        (h, final_state): [B, T, n] and [B, n].

    Raises:
        ValueError: a shape, name or mode is not as above.
        TypeError: a dtype is not as above.
    """
    check(x, weight, bias, initial_state, cu_seqlens)
    checks.check_mode("gru", mode, MODES)
    checks.check_count("gru", "chunk_size", chunk_size)
    size = 1 if mode == "recurrent" else chunk_size or DEFAULT_CHUNK_SIZE
    name = dispatch.pick("gru", backend, BACKENDS)
    args = (x, weight, bias, initial_state, cu_seqlens, max_seqlen, size)
    if name == "reference":
        return reference.forward(*args)
    h, final, _, _ = _op(*args, name)
    return h, final


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "gru"
    checks.check_wide(op, "x", x)
    checks.check_shape(op, "x", x, (None, None, None), "B, T, 3 n")
    n, rest = divmod(x.shape[2], 3)
    if rest:
        raise ValueError(f"{op}: expected x of 3 blocks of one width, got {tuple(x.shape)}.")
    checks.check_cu_seqlens(op, cu_seqlens, x.shape[0])
    rows, letters = (x.shape[0], "B, n") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N, n")
    checks.check_wide(op, "weight", weight, like=x)
    checks.check_shape(op, "weight", weight, (3 * n, n), "3 n, n")
    if bias is not None:
        checks.check_wide(op, "bias", bias, like=x)
        checks.check_shape(op, "bias", bias, (n,), "n")
    if initial_state is not None:
        checks.check_wide(op, "initial_state", initial_state, like=x)
        checks.check_shape(op, "initial_state", initial_state, (rows, n), letters)


def _fake(x, weight, bias, initial_state, cu_seqlens, max_seqlen, chunk_size):  # type: ignore[no-untyped-def]
    batch, length, _ = x.shape
    n = weight.shape[1]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        x.new_empty(batch, length, n),
        x.new_empty(rows, n),
        x.new_empty(length, batch, 3 * n),
        x.new_empty(length, batch, n),
    )


_op = TorchOp(
    "gru",
    tensors=("Tensor x", "Tensor weight", "Tensor? bias", "Tensor? initial_state", "Tensor? cu_seqlens"),
    options=("SymInt? max_seqlen", "SymInt chunk_size"),
    outputs=4,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
