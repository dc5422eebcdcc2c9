"""linear_scan: the laws of an op, and what is its own."""

import oracles
import pytest
import torch
from op_cases import Case, check, gates
from op_laws import OpLaws, each_mode, each_torch_mode

from seqzoo_kernels import linear_scan, precision

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestLinearScan(OpLaws):
    op = "linear_scan"
    variants = [
        "real",
        "constant",
        "rotated",
        "reverse",
        "rotated varying complex",
        "rotated constant reverse",
    ]

    def make(self, variant, *, T, B=2, size=3, seed=0, gate="extreme", state=True, cu=None):
        generator = torch.Generator().manual_seed(seed)
        words = variant.split()
        N, B = (len(cu) - 1, 1) if cu else (B, B)

        def normal(*shape, kind=torch.float64):
            return torch.randn(shape, generator=generator, dtype=kind)

        rotated, constant = "rotated" in words, "constant" in words
        inputs = {
            "log_decay": gates((size,) if constant else (B, T, size), gate, generator),
            "x": normal(B, T, size, kind=torch.complex128 if "complex" in words else torch.float64),
        }
        if rotated:
            inputs["phase"] = 2 * (normal(B, T, size) if "varying" in words else normal(size))
        if state:
            inputs["initial_state"] = normal(N, size, kind=torch.complex128 if rotated else torch.float64)
        options = {"reverse": True} if "reverse" in words else {}
        if cu:
            options["cu_seqlens"] = torch.tensor(cu)
            for x in inputs.values():
                if x.dim() == 3:
                    x[:, cu[-1] :] = torch.nan
        return Case(self.op, inputs, options)


@each_mode
def test_no_gradient_leaks_through_closed_gates(backend, mode):
    log_decay = torch.full((1, 40, 2), -0.1, dtype=torch.float64)
    log_decay[0, [0, 7, 20, 21, 39]] = -torch.inf
    case = Case("linear_scan", {"log_decay": log_decay, "x": torch.ones(1, 40, 2, dtype=torch.float64)}, {})
    result = check(case, backend, mode)
    assert (result["d_log_decay"][torch.isinf(log_decay)] == 0).all()


@each_mode
def test_constant_gates_of_all_kinds(backend, mode):
    """Open, nearly open, closing and closed channels side by side."""
    decays = [0.0, -1e-6, -3e-4, -1.0, -20.0, -100.0, -1e3, -1e9, -torch.inf]
    for variant in ("constant", "rotated constant reverse"):
        case = TestLinearScan().make(variant, T=80, size=len(decays))
        case.inputs["log_decay"] = torch.tensor(decays, dtype=torch.float64)
        result = check(case, backend, mode)
        assert result["d_log_decay"][-1] == 0
        check(case, backend, mode, torch.float32)


@each_mode
def test_near_one_decays_over_a_long_sequence(backend, mode):
    """exp(-1e-6) in float32 is off by 6e-8 a step, which must not add up."""
    T = 16_384
    x = torch.randn(1, T, 2, generator=torch.Generator().manual_seed(0))
    log_decay = torch.full((1, T, 2), -1e-6)
    exact, _ = oracles.numpy_linear_scan(log_decay.double().numpy(), x.double().numpy())
    reference, _ = linear_scan(log_decay, x, backend="reference")
    out, _ = linear_scan(log_decay, x, backend=backend, mode=mode)
    precision.check_close(out, torch.from_numpy(exact), reference, dtype=torch.float32, name="out")
    error = (out.double() - torch.from_numpy(exact)).abs().max() / torch.from_numpy(exact).abs().max()
    assert error < 5e-5


@pytest.mark.parametrize("T", [65, 512, 4096])
@each_torch_mode
def test_constant_phases_stay_exact(mode, T):
    """An LRU's regime: decays near one, any angle. Powers of the rotation must not come from a rounded angle * steps."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "log_decay": -1e-3 * torch.rand(16, generator=generator, dtype=torch.float64),
        "x": torch.randn(1, T, 16, generator=generator, dtype=torch.float64),
        "phase": torch.pi * (2 * torch.rand(16, generator=generator, dtype=torch.float64) - 1),
    }
    check(Case("linear_scan", inputs, {}), "torch", mode, torch.float32)


@pytest.mark.parametrize("T", [257, 1021, 4099])
@each_torch_mode
def test_prime_lengths(mode, T):
    case = TestLinearScan().make("real", T=T, B=1, gate="mild")
    check(case, "torch", mode, torch.float32)


@each_torch_mode
def test_half_precision_error_does_not_grow_with_length(mode):
    """Accumulators are float32: the last output is as good as the first."""
    T = 2048
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, 4, generator=generator).to(torch.bfloat16)
    log_decay = gates((1, T, 4), "mild", generator).float()
    exact, _ = oracles.numpy_linear_scan(log_decay.double().numpy(), x.double().numpy())
    out, final = linear_scan(log_decay, x, backend="torch", mode=mode)
    assert final.dtype == torch.float32
    exact = torch.from_numpy(exact)
    precision.check_close(
        final, exact[:, -1], final, dtype=torch.float32, name="final", scale=precision.largest(exact)
    )
    precision.check_close(out, exact, exact.to(torch.bfloat16), dtype=torch.bfloat16, name="out")


@each_torch_mode
def test_decoding_equals_the_full_pass(mode):
    """Token by token with the state carried, in bfloat16, as good as in one pass, whatever the length."""
    case = TestLinearScan().make("real", T=700, B=1, gate="near_one", state=False)
    check(case, "torch", mode, torch.bfloat16, cuts=list(range(1, 700)))


def test_time_reversal():
    case = TestLinearScan().make("reverse", T=30)
    forward = {n: x.flip(1) if x.dim() == 3 else x for n, x in case.inputs.items()}
    out, final = linear_scan(**case.inputs, reverse=True)
    flipped, last = linear_scan(**forward)
    torch.testing.assert_close(
        out, flipped.flip(1), rtol=0, atol=precision.allowed_error(out, None, out.dtype)
    )
    torch.testing.assert_close(final, last, rtol=0, atol=precision.allowed_error(final, None, out.dtype))


def test_phase_turns_the_state():
    """|h| does not see a constant phase that every input is turned by; a quarter turn four times is none."""
    x = torch.tensor([[[1.0], [0.0], [0.0], [0.0], [0.0]]], dtype=torch.float64)
    out, _ = linear_scan(
        torch.zeros(1, dtype=x.dtype), x, phase=torch.full((1,), torch.pi / 2, dtype=x.dtype)
    )
    expected = torch.tensor([1, 1j, -1, -1j, 1], dtype=out.dtype)[None, :, None]
    precision.check_close(out, expected, None, dtype=torch.float64, name="out")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": (2, 3, 5)}, ValueError, r"linear_scan: .*shape.*B, T, D.*D=[45].*\(2, 3, [45]\)"),
        ({"x": (2, 4)}, ValueError, r"linear_scan: .*x .*\(2, 4\)"),
        ({"log_decay": (2, 3, 5)}, ValueError, r"linear_scan: .*\(2, 3, 5\)"),
        ({"log_decay": (5,)}, ValueError, r"linear_scan: .*log_decay.*\(5,\)"),
        ({"log_decay": (3, 4)}, ValueError, r"linear_scan: .*log_decay.*\(3, 4\)"),
        ({"phase": (5,)}, ValueError, r"linear_scan: .*phase.*\(5,\)"),
        ({"initial_state": (2, 5)}, ValueError, r"linear_scan: .*initial_state.*\(2, 5\)"),
        ({"initial_state": (2, 3, 4)}, ValueError, r"linear_scan: .*initial_state.*\(2, 3, 4\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_shapes(change, error, text, backend):
    arguments = {"log_decay": torch.zeros(2, 3, 4), "x": torch.zeros(2, 3, 4)}
    arguments.update({n: torch.zeros(shape) for n, shape in change.items()})
    with pytest.raises(error, match=text):
        linear_scan(**arguments, backend=backend)


def test_wrong_dtypes():
    g, x = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    with pytest.raises(TypeError, match=r"linear_scan: .*log_decay.*complex"):
        linear_scan(g.to(torch.complex64), x)
    with pytest.raises(TypeError, match=r"linear_scan: .*x.*int64"):
        linear_scan(g, x.long())
    with pytest.raises(TypeError, match=r"linear_scan: .*phase.*complex"):
        linear_scan(g, x, phase=torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"linear_scan: .*x.*complex"):  # a complex x without a phase
        linear_scan(g, x.to(torch.complex64))
    with pytest.raises(TypeError, match=r"linear_scan: .*initial_state.*complex"):  # and a complex state
        linear_scan(g, x, initial_state=torch.zeros(1, 4, dtype=torch.complex64))
