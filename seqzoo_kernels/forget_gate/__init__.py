"""The forget gate of HGRN and its kin, with the input that it lets in: elementwise, one kernel on a GPU each way."""

import torch
from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

# "reference" stands before "torch": a compiler fuses it with what is around it, and any transform goes through it.
BACKENDS = {"triton": dispatch.Later(f"{__name__}.triton"), "reference": reference, "torch": eager}


def forget_gate(
    logits: Tensor,
    lower_bound: Tensor | float | None = None,
    x: Tensor | None = None,
    *,
    open_part: Tensor | None = None,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A forget gate f in [lower_bound, 1], and what it lets in of x.

        f = lower_bound + (1 - lower_bound) sigmoid(logits)        u = (1 - f) activation(x)

    Neither log f nor 1 - f cancels: this is (1 - lower_bound) sigmoid(-logits), and near f = 1 that is log1p of it. All is
    computed in float32 (float64 for float64 logits).

    Args:
        logits: [..., D].
        lower_bound: gamma in [0, 1), a number or [D]; None is 0.
        x: [..., D], or [..., D, 2] for two numbers a channel, such as the parts of a complex one; None for u = 1 - f.
        open_part: 1 - lower_bound, [D], for who has it more exactly than that difference. What their gradients mean is the
            derivative along lower_bound + open_part = 1; how the two share it is left to the backend.
        activation: of x: "silu" or None.
        dtype: of u, by default that of log f.
        backend: "triton" (on a GPU, in float32 and below), "reference", "torch" (which keeps nothing but the inputs for its
            backward), or "auto", the first of these that can.

    Returns:
        (log f, u): log f in float32 (float64), in the shape of logits; u in that of x.

    Raises:
        ValueError: a shape or name is not as above.
        TypeError: a dtype is not as above.

    Source: Qin et al. 2023, arXiv:2311.04823.
    """
    check(logits, x, activation)
    bound, floor = (lower_bound, 0.0) if isinstance(lower_bound, Tensor) else (None, float(lower_bound or 0))
    dtype = checks.state_dtype(logits.dtype) if dtype is None else dtype
    name = dispatch.pick(
        "forget_gate", backend, BACKENDS, {"triton": _no_triton(logits, bound, open_part, x, dtype)}
    )
    args = (logits, bound, open_part, x, floor, activation == "silu", dtype)
    if name == "reference":
        return reference.forward(*args)
    log_f, u = _op(*args, name)
    return log_f, u


def check(logits: Tensor, x: Tensor | None, activation: str | None) -> None:
    op = "forget_gate"
    checks.check_float(op, "logits", logits)
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: expected activation to be None or 'silu', got {activation!r}.")
    if x is None:
        return
    checks.check_float(op, "x", x)
    if x.shape not in (logits.shape, (*logits.shape, 2)):
        raise ValueError(
            f"{op}: expected x of the shape of logits, {tuple(logits.shape)}, or that and two numbers a channel, "
            f"got {tuple(x.shape)}."
        )


def _no_triton(
    logits: Tensor, bound: Tensor | None, open_part: Tensor | None, x: Tensor | None, dtype: torch.dtype
) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    given = {"logits": logits, "lower_bound": bound, "open_part": open_part, "x": x}
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype == torch.float64:
            return f"it computes in float32, and {name} is {tensor.dtype}"
    if dtype == torch.float64:
        return f"it computes in float32, and dtype is {dtype}"
    width = logits.shape[-1:]
    if any(t is not None and t.shape != width for t in (bound, open_part)):
        return f"it takes bounds of shape ({', '.join(map(str, width))}) only"
    if open_part is not None and bound is None:
        return "it takes an open_part beside a lower_bound [D] only"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func goes through plain torch"
    return dispatch.no_triton(logits, "logits")


def _fake(logits, lower_bound, open_part, x, floor, silu, dtype):  # type: ignore[no-untyped-def]
    return (
        logits.new_empty(logits.shape, dtype=checks.state_dtype(logits.dtype)),
        logits.new_empty(logits.shape if x is None else x.shape, dtype=dtype),
    )


_op = TorchOp(
    "forget_gate",
    tensors=("Tensor logits", "Tensor? lower_bound", "Tensor? open_part", "Tensor? x"),
    options=("float floor", "bool silu", "ScalarType dtype"),
    outputs=2,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
    keeps_outputs=False,
)
