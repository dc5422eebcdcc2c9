"""gated_norm on a CPU, what it launches on a GPU, and that mixers give the bits that torch's own modules do."""

import hopper
import pytest
import torch
from gated_norm_cases import Case, cases, judge
from hypothesis import given
from torch.nn import functional as F

from seqzoo.layers import make_norm, norm_and_gate
from seqzoo_kernels.gated_norm import gated_norm
from seqzoo_kernels.gated_norm import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@given(cases())
def test_law_8(case):
    if case.dtype == torch.float32:  # in half precision torch rounds before the norm, to the weight's dtype
        judge(case, "torch")


@pytest.mark.parametrize("position", ["pre_gate", "post_gate"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradients(norm, position):
    for complex_h in (False, True):
        case = Case((2, 3, 4), norm, "silu", position, complex_h=complex_h)
        leaves = [t.requires_grad_() for t in case.tensors()]
        for name in ("torch", "reference"):
            assert torch.autograd.gradcheck(
                lambda *given, name=name, case=case: gated_norm(*given, backend=name, **case.options()),
                leaves,
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms", "simple_rms"])
def test_it_is_torchs_module_and_a_product(kind, dtype):
    """To the last bit, of a float32 h beside parameters and gates of `dtype`."""
    norm, h, gate = make_norm(kind, 6, 1e-5).to(dtype), torch.randn(2, 3, 6), torch.randn(2, 3, 6).to(dtype)
    kept = h if norm.weight is None else h.to(dtype)
    assert torch.equal(norm_and_gate(norm, h, dtype=dtype), norm(kept).to(dtype))
    wanted = (norm(kept) * F.silu(gate)).to(dtype)
    assert torch.equal(norm_and_gate(norm, h, gate, "silu", dtype=dtype), wanted)
    inner = h * torch.sigmoid(gate)
    wanted = norm(inner if norm.weight is None else inner.to(dtype)).to(dtype)
    assert torch.equal(norm_and_gate(norm, h, gate, "sigmoid", "post_gate", dtype=dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_an_eps_it_is_torchs(dtype):
    h = 1e-4 * torch.randn(3, 5, dtype=dtype)
    wanted = F.rms_norm(h, (5,))
    torch.testing.assert_close(gated_norm(h, norm="rms", eps=None), wanted)


@pytest.mark.parametrize("position", ["pre_gate", "post_gate"])
@pytest.mark.parametrize(
    ("dtype", "width", "kind", "complex_h"),
    [
        (torch.bfloat16, 2048, "layer", False),
        (torch.bfloat16, 128, "rms", False),
        (torch.bfloat16, 4096, "layer", True),
        (torch.float16, 8192, "simple_rms", False),
        (torch.float32, 100, "layer", False),
    ],
)
def test_launched(dtype, width, kind, complex_h, position, tmp_path, monkeypatch):
    """Both kernels for sm_90; words of 16 bytes are read or written, and two programs fit beside each other."""
    h = torch.zeros(
        70, width // 2 if complex_h else width, dtype=torch.complex64 if complex_h else torch.float32
    )
    gate, weight = torch.zeros(70, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    weight, bias = (None if kind == "simple_rms" else weight), (weight if kind == "layer" else None)
    args = (h, gate, weight, bias, kind.removeprefix("simple_"), 1e-5, "silu", position, dtype)
    with hopper.launches(monkeypatch, tmp_path) as found:
        (y,) = backend.forward(*args)
        backend.backward(y, y, *args)
    assert [built.metadata.name for built in found] == ["forward_kernel", "backward_kernel"]
    for built in found:
        assert built.asm["cubin"]
        assert built.metadata.shared <= hopper.SHARED_MEMORY // 2
        assert width == 100 or ".global.v4.b32" in built.asm["ptx"]


def test_wrong_inputs():
    h, options = torch.ones(2, 3, 4), {"norm": "rms", "eps": 1e-5}
    with pytest.raises(ValueError, match=r"gated_norm: expected gate of shape \(2, 3, 4\), got \(2, 4\)"):
        gated_norm(h, torch.ones(2, 4), **options)
    with pytest.raises(ValueError, match=r"gated_norm: expected weight of shape \(8,\), got \(4,\)"):
        gated_norm(h.to(torch.complex64), None, torch.ones(4), **options)
    with pytest.raises(ValueError, match=r"gated_norm: expected norm to be one of 'layer', 'rms', got 'l2'"):
        gated_norm(h, norm="l2", eps=1e-5)
    with pytest.raises(ValueError, match=r"gated_norm: expected h of shape \(\.\.\., N\).*got \(3, 0\)"):
        gated_norm(torch.ones(3, 0), **options)
    with pytest.raises(
        TypeError, match=r"gated_norm: expected gate to be a real floating tensor, got torch.int64"
    ):
        gated_norm(h, torch.ones(2, 3, 4, dtype=torch.int64), **options)
    with pytest.raises(
        ValueError, match=r"gated_norm: backend 'triton' can't be used: it needs a GPU, and h is on cpu"
    ):
        gated_norm(h, backend="triton", **options)
