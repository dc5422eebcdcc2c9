"""gated_norm's Triton kernels in Triton's interpreter; run by test_triton.py in a process of its own."""

import pytest
import torch
from gated_norm_cases import Case, cases, evaluate, judge
from hypothesis import given

from seqzoo_kernels.gated_norm import gated_norm
from seqzoo_kernels.gated_norm import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True, scope="module")
def several_programs():
    """Few rows to a program and few programs, so that those of backward loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "TILE", 64)
        patch.setattr(backend, "PROGRAMS", 3)
        yield


@given(cases())
def test_law_8(case):
    judge(case, "triton")


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 1, 1), (1, 1, 300), (40, 3)], ids=str)
@pytest.mark.parametrize("complex_h", [False, True])
def test_shapes(shape, complex_h):
    for position in ("pre_gate", "post_gate"):
        judge(Case(shape, "layer", "silu", position, complex_h=complex_h), "triton")


def test_rows_of_zeros_without_eps_are_of_no_account_outside():
    case = Case((5, 7), "layer", "silu", "pre_gate", eps=0.0)
    judge(case, "triton")


@pytest.mark.parametrize("complex_h", [False, True])
def test_it_is_a_right_torch_op(complex_h):
    case = Case((2, 3, 5), "layer", "silu", "pre_gate", complex_h=complex_h)
    leaves = [t.float() if not t.is_complex() else t.to(torch.complex64) for t in case.tensors()]
    leaves = [t.detach().requires_grad_() for t in leaves]
    args = (*leaves, "layer", 1e-5, "silu", "pre_gate", torch.float32, "triton")
    torch.library.opcheck(torch.ops.seqzoo.gated_norm.default, args)


def test_second_derivatives():
    """Those of the reference, joined to the kernels' first ones."""
    case = Case((2, 3, 5), "layer", "silu", "post_gate")
    found = []
    for name in ("triton", "reference"):
        leaves = [t.float().requires_grad_() for t in case.tensors()]
        y = gated_norm(*leaves, backend=name, **case.options())
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), leaves))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_twice_the_same_bits():
    case = Case((9, 20), "layer", "silu", "pre_gate")
    first, second = (evaluate(case, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_it_does_not_serve_is_refused():
    h = torch.ones(2, 9000)
    options = {"norm": "rms", "eps": 1e-5, "backend": "triton"}
    for x, why in ((h.double(), "float32, and h is"), (h, "8192 features, and h has 9000")):
        with pytest.raises(ValueError, match=rf"gated_norm: backend 'triton' can't be used: .*{why}.*torch"):
            gated_norm(x, **options)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda x: gated_norm(x[:, :5], **options).sum())(h)


def test_auto_takes_it():
    case = Case((3, 5), "rms", "silu", "pre_gate")
    ours, auto = (evaluate(case, name, torch.float32) for name in ("triton", "auto"))
    assert all(torch.equal(a, b) for a, b in zip(ours, auto, strict=True))
    torch.func.grad(lambda x: gated_norm(x, norm="rms", eps=1e-5).sum())(torch.ones(2, 3))
