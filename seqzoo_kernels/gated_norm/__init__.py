"""What ends a mixer: the norm of its features and the output gate, in one op."""

from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch
from ..register import TorchOp
from . import eager, reference

BACKENDS: dict[str, Any] = {
    "triton": dispatch.Later(f"{__name__}.triton"),
    "torch": eager,
    "reference": reference,
}
MAX_WIDTH = 8192  # a row must fit into the registers of one program
CHOICES = {
    "norm": ("layer", "rms"),
    "act": (*reference.ACTIVATIONS,),
    "position": ("pre_gate", "post_gate"),
}


def gated_norm(
    h: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: str,
    eps: float | None,
    act: str | None = None,
    position: str = "pre_gate",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Norm over the last dimension, with a gate of its result or of what goes in.

        pre_gate    y = n(h) * act(gate)        post_gate    y = n(h * act(gate))
        rms         n(u) = u / sqrt(mean(u^2) + eps) * weight + bias
        layer       n(u) = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias

    Args:
        h: [..., N], or complex [..., N / 2] for its real and then its imaginary parts.
        gate: [..., N]; None is none.
        weight: [N]; None is 1.
        bias: [N]; None is 0.
        norm: "layer" or "rms".
        eps: None for that of float32, in float64 that of float64, as torch has it.
        act: "silu", "sigmoid" or None.
        position: "pre_gate" or "post_gate".
        dtype: of the result, real; h's by default.
        backend: "triton" (on a GPU, for N up to 8192, not in float64 nor under a transform of torch.func), which computes in
            float32; "torch", which normalises in the dtype of the weight; "reference"; or "auto".

    Returns:
        y, [..., N].

    Raises:
        ValueError: a shape, name or backend is not as above.
        TypeError: a dtype is not as above.
    """
    check(h, gate, weight, bias, norm, act, position)
    real = h.real.dtype if h.is_complex() else h.dtype
    eps = torch.finfo(checks.state_dtype(h.dtype)).eps if eps is None else eps
    name = dispatch.pick("gated_norm", backend, BACKENDS, {"triton": _no_triton(h)})
    args = (h, gate, weight, bias, norm, eps, act, position, real if dtype is None else dtype)
    if name != "triton":  # differentiated by torch
        return BACKENDS[name].forward(*args)[0]
    return _op(*args, name)[0]


def check(
    h: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str,
    act: str | None,
    position: str,
) -> None:
    op = "gated_norm"
    for option, value in (("norm", norm), ("act", act), ("position", position)):
        if value not in CHOICES[option]:
            choices = ", ".join(map(repr, CHOICES[option]))
            raise ValueError(f"{op}: expected {option} to be one of {choices}, got {value!r}.")
    checks.check_float(op, "h", h, complex_allowed=True)
    if h.dim() == 0 or h.shape[-1] == 0:
        raise ValueError(f"{op}: expected h of shape (..., N) with N of at least 1, got {tuple(h.shape)}.")
    shape = reference.real_shape(h)
    for name, tensor, expected in (
        ("gate", gate, shape),
        ("weight", weight, shape[-1:]),
        ("bias", bias, shape[-1:]),
    ):
        if tensor is None:
            continue
        checks.check_float(op, name, tensor)
        if tensor.shape != expected:
            raise ValueError(f"{op}: expected {name} of shape {tuple(expected)}, got {tuple(tensor.shape)}.")


def _no_triton(h: Tensor) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    if checks.state_dtype(h.dtype) == torch.float64:
        return f"it computes in float32, and h is {h.dtype}"
    width = reference.real_shape(h)[-1]
    if width > MAX_WIDTH:
        return f"it has a row in one program, of at most {MAX_WIDTH} features, and h has {width}"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func can't look into it"
    return dispatch.no_triton(h, "h")


def _fake(h, gate, weight, bias, norm, eps, act, position, dtype):  # type: ignore[no-untyped-def]
    return (h.new_empty(reference.real_shape(h), dtype=dtype),)


_op = TorchOp(
    "gated_norm",
    tensors=("Tensor h", "Tensor? gate", "Tensor? weight", "Tensor? bias"),
    options=("str norm", "float eps", "str? act", "str position", "ScalarType dtype"),
    outputs=1,
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
