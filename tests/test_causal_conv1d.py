"""causal_conv1d: the laws of an op, and what is its own."""

import pytest
import torch
from op_cases import Case, check
from op_laws import OpLaws, each_mode

from seqzoo_kernels import causal_conv1d

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestCausalConv1d(OpLaws):
    op = "causal_conv1d"
    variants = ["4", "4 bias silu", "1 bias", "2 silu", "7 bias"]

    def make(self, variant, *, T, B=2, size=3, seed=0, gate="extreme", state=True, cu=None):
        generator = torch.Generator().manual_seed(seed)
        width, *words = variant.split()
        N, B = (len(cu) - 1, 1) if cu else (B, B)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inputs = {"x": normal(B, T, size), "weight": normal(size, int(width))}
        if "bias" in words:
            inputs["bias"] = normal(size)
        if state:
            inputs["initial_state"] = normal(N, int(width) - 1, size)
        options = {"activation": "silu"} if "silu" in words else {}
        if cu:
            options["cu_seqlens"] = torch.tensor(cu)
            inputs["x"][:, cu[-1] :] = torch.nan
        return Case(self.op, inputs, options)


@each_mode
def test_the_last_tap_is_the_present(backend, mode):
    x = torch.arange(1.0, 6.0).reshape(1, 5, 1)
    out, state = causal_conv1d(x, torch.tensor([[100.0, 10.0, 1.0]]), backend=backend, mode=mode)
    assert out.flatten().tolist() == [1, 12, 123, 234, 345]
    assert state.flatten().tolist() == [4, 5]
    out, state = causal_conv1d(x[:, :1], torch.tensor([[100.0, 10.0, 1.0]]), backend=backend, mode=mode)
    assert state.flatten().tolist() == [0, 1]


@each_mode
def test_sequences_shorter_than_the_taps_hand_the_tail_on(backend, mode):
    case = TestCausalConv1d().make("7 bias", T=5)
    check(case, backend, mode, cuts=[1, 2, 4])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": (2, 4)}, r"x.*\(2, 4\)"),
        ({"weight": (5, 3)}, r"\(5, 3\)"),
        ({"weight": (4,)}, r"weight.*\(4,\)"),
        ({"weight": (4, 0)}, r"weight.*\(4, 0\)"),
        ({"bias": (3,)}, r"bias.*\(3,\)"),
        ({"initial_state": (2, 3, 4)}, r"initial_state.*\(2, 3, 4\)"),
        ({"initial_state": (2, 2, 5)}, r"initial_state.*\(2, 2, 5\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_shapes(change, text, backend):
    arguments = {"x": torch.zeros(2, 3, 4), "weight": torch.zeros(4, 3)}
    arguments.update({n: torch.zeros(shape) for n, shape in change.items()})
    with pytest.raises(ValueError, match=rf"causal_conv1d: .*{text}"):
        causal_conv1d(**arguments, backend=backend)


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"causal_conv1d: .*activation.*'swoosh'.*silu|silu.*'swoosh'"):
        causal_conv1d(torch.zeros(1, 3, 4), torch.zeros(4, 3), activation="swoosh")
