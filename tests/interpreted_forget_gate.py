"""forget_gate's Triton kernels in Triton's interpreter; run by test_triton.py in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqzoo_kernels import precision
from seqzoo_kernels.forget_gate import forget_gate
from seqzoo_kernels.forget_gate import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EXTREME = (100.0, -100.0, 20.0, -20.0, 0.0, 1e-6, torch.inf, -torch.inf)
BOUNDS = ["none", "number", "tensor", "open"]


def inputs(B, T, D, dtype, numbers, *, seed=0, size=4.0, wide=True, shift=0):
    """logits with extremes among them, x, and a rate for the bound; chunks of wider tensors where they are to be, and `shift`
    numbers behind the start of memory."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(width):
        whole = size * torch.randn(B, T, (1 + wide) * width + shift, generator=generator)
        return whole.to(dtype)[..., shift + wide * width :]

    z, x = drawn(D), drawn(max(numbers, 1) * D)
    flat = z.transpose(0, 1) if B == 1 else z
    for k, value in enumerate(EXTREME):
        if T and B and D:
            flat[k % flat.shape[0], (k // 2) % flat.shape[1], k % D] = value
    return z, x.unflatten(-1, (D, 2)) if numbers == 2 else x, torch.rand(D, generator=generator) + 0.05


def evaluate(backend, tensors, bound, numbers, dtype, *, silu=True, u_dtype=None):
    z, x, rate = (t.detach().to(dtype).requires_grad_() for t in tensors)
    rate = tensors[2].double().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    gamma = {"none": None, "number": 0.3}.get(bound, torch.exp(-rate))
    open_part = -torch.expm1(-rate) if bound == "open" else None
    log_f, u = forget_gate(
        z, gamma, x if numbers else None, open_part=open_part, activation="silu" if silu else None,
        dtype=u_dtype, backend=backend,
    )  # fmt: skip
    finite = torch.where(log_f.isfinite(), log_f, 0).double()
    weights = torch.randn(u.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights_of_f = (weights.sum(-1) if numbers == 2 else weights).cos()
    total = (finite * weights_of_f).sum() + (u.double() * weights).sum()
    wanted = [z, *([x] if numbers else []), *([rate] if bound in ("tensor", "open") else [])]
    return [log_f.detach(), u.detach(), *torch.autograd.grad(total, wanted)]


def check(B, T, D, dtype, bound, numbers, **options):
    how = {name: options.pop(name) for name in ("silu", "u_dtype") if name in options}
    tensors = inputs(B, T, D, dtype, numbers, **options)
    ours, again = (evaluate("triton", tensors, bound, numbers, dtype, **how) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    plain = evaluate("reference", tensors, bound, numbers, torch.float32, silu=how.get("silu", True))
    exact = evaluate("reference", tensors, bound, numbers, torch.float64, silu=how.get("silu", True))
    for k, (value, near, right) in enumerate(zip(ours, plain, exact, strict=True)):
        precision.check_close(value, right, near, dtype=value.dtype, name=f"{k} of {bound}, {numbers}")
    right = torch.where(exact[0].abs() < torch.finfo(torch.float32).tiny, 1, exact[0])
    share = torch.where(right == exact[0], ours[0].double() / right, 1)
    share = torch.where(ours[0].double() == exact[0], 1, share)
    one = torch.ones_like(share)
    precision.check_close(share, one, one, dtype=torch.float32, name="log f, relative")


@pytest.mark.parametrize("numbers", [0, 1, 2])
@pytest.mark.parametrize("bound", BOUNDS)
def test_law_8(bound, numbers):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(2, 5, 9, dtype, bound, numbers)


@settings(max_examples=25)
@given(
    B=st.integers(0, 3), T=st.integers(0, 9), D=st.sampled_from([1, 3, 16, 33, 300]), bound=st.sampled_from(BOUNDS),
    numbers=st.integers(0, 2), dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 99),
    size=st.sampled_from([0.1, 4.0, 40.0]), wide=st.booleans(), shift=st.integers(0, 1), silu=st.booleans(),
)  # fmt: skip
def test_any_shape_bound_and_layout(B, T, D, bound, numbers, dtype, **options):
    check(B, T, D, dtype, bound, numbers, **options)


def test_several_tiles_a_program(monkeypatch):
    monkeypatch.setattr(backend, "PROGRAMS", 3)
    monkeypatch.setattr(backend, "TILE", 64)
    monkeypatch.setattr(backend, "WIDTH", 32)
    for numbers in (0, 1, 2):
        check(2, 23, 40, torch.float32, "tensor", numbers)


def test_u_in_half_precision_is_u_rounded():
    z, x, _ = inputs(2, 5, 9, torch.float16, 1)
    wide, half = (forget_gate(z, 0.3, x, dtype=dtype, backend="triton")[1] for dtype in (None, torch.float16))
    assert half.dtype == torch.float16 and torch.equal(half, wide.half())


def test_a_logit_that_is_nan_shows():
    z = torch.zeros(1, 2, 3)
    z[0, 1, 2] = torch.nan
    for bound in (None, 0.3):
        for out in forget_gate(z, bound, backend="triton"):
            assert out[0, 1, 2].isnan() and out.isnan().sum() == 1


def test_auto_takes_it_and_a_transform_does_not():
    z, x, _ = inputs(2, 5, 9, torch.float32, 1)
    ours, auto = (forget_gate(z, 0.3, x, backend=name)[1] for name in ("triton", "auto"))
    assert torch.equal(ours, auto)
    mapped = torch.vmap(lambda z, x: forget_gate(z, 0.3, x)[1])(z, x)
    assert torch.equal(mapped, forget_gate(z, 0.3, x, backend="reference")[1])
    with pytest.raises(ValueError, match=r"'triton' can't be used: it takes bounds of shape \(9\) only"):
        forget_gate(z, torch.tensor(0.3), backend="triton")


def test_it_is_a_right_torch_op():
    z, x, rate = (t.requires_grad_() for t in inputs(2, 3, 4, torch.float32, 2, wide=False))
    gamma = torch.exp(-rate).detach().requires_grad_()
    args = (z, gamma, None, x, 0.0, True, torch.float32, "triton")
    torch.library.opcheck(torch.ops.seqzoo.forget_gate.default, args)
