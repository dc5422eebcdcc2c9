"""One call of gated_norm as a value, and its comparison with float64 by law 8."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from seqzoo_kernels import precision
from seqzoo_kernels.gated_norm import gated_norm, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """shape is that of h, as real numbers or as complex ones; size that of h, reach that of the gate's logits."""

    shape: tuple[int, ...]
    norm: str
    act: str | None
    position: str
    eps: float = 1e-5
    gated: bool = True
    weighted: bool = True
    shifted: bool = True
    complex_h: bool = False
    strided: bool = False
    size: float = 1.0
    reach: float = 2.0
    dtype: torch.dtype = torch.float32

    def options(self):
        return {"norm": self.norm, "act": self.act, "position": self.position, "eps": self.eps}

    def tensors(self):
        """h, gate, weight and bias in float64, the numbers of their dtypes; strided ones are part of something wider."""
        torch.manual_seed(sum(self.shape))

        def drawn(*shape, dtype=torch.float64):
            return torch.randn(*shape, dtype=dtype)

        width = self.shape[-1] * (2 if self.complex_h else 1)
        h = self.size * drawn(*self.shape, dtype=torch.complex128 if self.complex_h else torch.float64)
        gate = self.reach * drawn(*self.shape[:-1], width)
        found = h, gate if self.gated else None, drawn(width) if self.weighted else None
        return [self.rounded(t) for t in (*found, drawn(width) if self.shifted else None)]

    def rounded(self, t):
        if t is None or t.is_complex():
            return t if t is None else t.to(torch.complex64).to(t.dtype)
        return t.to(self.dtype).double()


def evaluate(case, backend, dtype):
    """y and the gradients of all inputs, with a complex h in single precision beside halves."""
    leaves = []
    for t in case.tensors():
        if t is None:
            leaves.append(None)
            continue
        kind = dtype
        if t.is_complex():
            kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        t = t.to(kind)
        if case.strided and t.dim() > 1:
            t = torch.cat([t, t, t], -1).narrow(-1, t.shape[-1], t.shape[-1])
        leaves.append(t.detach().requires_grad_())
    y = gated_norm(*leaves, dtype=dtype, backend=backend, **case.options())
    assert y.dtype == dtype
    grad = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(case.dtype).to(dtype)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return y.detach(), *torch.autograd.grad(y, wanted, grad)


def judge(case, backend):
    exact = evaluate(case, "reference", torch.float64)
    plain = evaluate(case, "reference", case.dtype)
    found = evaluate(case, backend, case.dtype)
    h, gate, weight, bias = case.tensors()
    rows = exact[0].shape
    terms = iter(_terms(case, h, gate, weight, bias, rows))
    parameters = (weight is not None) + (bias is not None)
    for place, (ours, right, near) in enumerate(zip(found, exact, plain, strict=True)):
        scale = None
        if place >= len(found) - parameters:  # a sum over rows
            scale = max(precision.largest(right), precision.largest(next(terms).abs().flatten(0, -2).sum(0)))
        precision.check_close(ours, right, near, dtype=case.dtype, name=f"{place} of {case}", scale=scale)


def _terms(case, h, gate, weight, bias, shape):
    """What each row adds to the gradients of weight and bias: its norm and 1, times the gate behind it and the cotangent."""
    (bare,) = reference.forward(
        h, gate, None, None, case.norm, case.eps, case.act, case.position, torch.float64
    )
    outer = gate is not None and case.position == "pre_gate"
    a = reference.ACTIVATIONS[case.act](gate) if outer else torch.ones(shape, dtype=torch.float64)
    grad = torch.linspace(-1, 2, bare.numel(), dtype=bare.dtype).view(shape)
    return [grad * term for term, t in ((bare, weight), (a, bias)) if t is not None]


@st.composite
def cases(draw):
    rows = draw(st.sampled_from([(1,), (2, 3), (7, 5), (2, 3, 4)]))
    return Case(
        (*rows, draw(st.sampled_from([1, 2, 5, 16, 33, 64, 130]))),
        draw(st.sampled_from(["layer", "rms"])),
        draw(st.sampled_from(["silu", "sigmoid", None])),
        draw(st.sampled_from(["pre_gate", "post_gate"])),
        eps=draw(st.sampled_from([1e-5, 1e-6])),
        **{name: draw(st.booleans()) for name in ("gated", "weighted", "shifted", "complex_h", "strided")},
        size=draw(st.sampled_from([1e-6, 1.0, 1e3])),
        reach=draw(st.sampled_from([0.1, 2.0, 90.0])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
