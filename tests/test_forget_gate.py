"""forget_gate, the op under the gates of HGRN: its gradient, its place among torch's ops, and what it launches on a GPU."""

import re

import hopper
import pytest
import torch

from seqzoo_kernels.forget_gate import forget_gate
from seqzoo_kernels.forget_gate import triton as backend

B, T, D = 2, 3, 4
CASES = [(bound, x) for bound in ("none", "number", "tensor", "open") for x in ("none", "one", "pair")]


def leaves(bound, x):
    """logits, x and a rate, from which the bound is made, in float64."""
    torch.manual_seed(0)
    shape = {"none": (0,), "one": (B, T, D), "pair": (B, T, D, 2)}[x]
    values = [4 * torch.randn(B, T, D), torch.randn(shape), torch.rand(D) + 0.1]
    return [v.double().requires_grad_() for v in values]


def call(bound, x, given, backend, **options):
    z, value, rate = given
    gamma = {"none": None, "number": 0.3}.get(bound, torch.exp(-rate))
    open_part = -torch.expm1(-rate) if bound == "open" else None
    value = None if x == "none" else value
    return forget_gate(z, gamma, value, open_part=open_part, activation="silu", backend=backend, **options)


@pytest.mark.parametrize(("bound", "x"), CASES)
class TestGradients:
    def test_first(self, bound, x):
        """Written out in the torch backend, they are those of the plain form and of differences."""
        given, found = leaves(bound, x), []
        for name in ("torch", "reference"):
            log_f, u = call(bound, x, given, name)
            total = (log_f * log_f.detach().cos()).sum() + (u * u.detach().cos()).sum()
            found.append([log_f, u, *torch.autograd.grad(total, given, allow_unused=True)])
        for got, wanted in zip(*found, strict=True):
            assert (got is None) == (wanted is None)
            if got is not None:
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        assert torch.autograd.gradcheck(lambda *g: call(bound, x, g, "torch"), given, fast_mode=True)

    def test_second(self, bound, x):
        def function(*given):
            return call(bound, x, given, "torch")

        assert torch.autograd.gradgradcheck(function, leaves(bound, x), fast_mode=True)


def test_it_is_a_right_torch_op():
    z, x, rate = leaves("open", "pair")
    gamma, o = torch.exp(-rate).detach().requires_grad_(), -torch.expm1(-rate).detach()
    for args in ((z, None, None, None), (z, gamma, None, x), (z, gamma, o.requires_grad_(), x)):
        torch.library.opcheck(
            torch.ops.seqzoo.forget_gate.default, (*args, 0.0, True, torch.float64, "torch")
        )


def test_auto_is_the_plain_form_without_a_gpu():
    z, x, rate = (t.float() for t in leaves("tensor", "one"))
    ours, plain = (call("tensor", "one", (z, x, rate), name) for name in ("auto", "reference"))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    mapped = torch.vmap(lambda z, x: call("tensor", "one", (z, x, rate), "auto"))(z, x)
    assert all(torch.equal(a, b) for a, b in zip(mapped, plain, strict=True))


def test_wrong_inputs():
    z = torch.zeros(B, T, D)
    with pytest.raises(
        ValueError, match=r"forget_gate: expected x of the shape of logits, \(2, 3, 4\).*\(2, 3, 5\)"
    ):
        forget_gate(z, x=torch.zeros(B, T, D + 1))
    with pytest.raises(
        ValueError, match=r"forget_gate: expected activation to be None or 'silu', got 'tanh'"
    ):
        forget_gate(z, x=z, activation="tanh")
    with pytest.raises(TypeError, match=r"forget_gate: expected logits to be a real floating tensor.*int64"):
        forget_gate(z.long())
    with pytest.raises(
        ValueError, match=r"forget_gate: backend 'triton' can't be used: it needs a GPU, and logits"
    ):
        forget_gate(z, backend="triton")
    with pytest.raises(ValueError, match=r"'triton' can't be used: it computes in float32, and logits"):
        forget_gate(z.double(), backend="triton")


def launched(dtype, bound, numbers, width, cache, monkeypatch):
    """Both passes over chunks of a wider tensor, as a short convolution leaves them."""
    z = torch.zeros(1, 70, 2 * width, dtype=dtype)[..., width:]
    x = torch.zeros(1, 70, 2 * numbers * width, dtype=dtype)[..., numbers * width :]
    x = x.unflatten(-1, (width, 2)) if numbers == 2 else x
    gamma = torch.zeros(width) if bound in ("tensor", "open") else None
    o = torch.ones(width) if bound == "open" else None
    args = (z, gamma, o, x if numbers else None, 0.3 if bound == "number" else 0.0, True, torch.float32)
    with hopper.launches(monkeypatch, cache) as found:
        log_f, u = backend.forward(*args)
        backend.backward(log_f, u, *args)
    return found


@pytest.mark.parametrize(
    ("dtype", "bound", "numbers", "width"),
    [
        (torch.bfloat16, "tensor", 1, 2048),
        (torch.bfloat16, "tensor", 2, 2048),
        (torch.bfloat16, "open", 0, 2048),
        (torch.bfloat16, "none", 1, 100),
        (torch.float16, "number", 2, 33),
        (torch.float32, "tensor", 1, 256),
    ],
)
def test_launched(dtype, bound, numbers, width, tmp_path, monkeypatch):
    """Compiled for sm_90: one kernel each way, whose threads read 16 bytes at once where the width lets them."""
    found = launched(dtype, bound, numbers, width, tmp_path, monkeypatch)
    assert [built.metadata.name for built in found] == ["forward_kernel", "backward_kernel"]
    for built in found:
        assert built.asm["cubin"]
        assert built.metadata.shared <= 16384
        assert not re.search(r"\b(atom|red)\.", built.asm["ptx"])
        assert width % 16 or "ld.global.v4.b32" in built.asm["ptx"]
