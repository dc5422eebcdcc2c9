"""lstm's Triton kernels in Triton's interpreter; run by test_triton.py in a process of its own."""

import pytest
import torch

from seqzoo_kernels import precision
from seqzoo_kernels.lstm import CELLS, lstm

pytestmark = pytest.mark.usefixtures("poisoned_memory")
VARIANTS = sorted(CELLS.keys() - {"FGR"})


def inputs(variant, cu, size, n=5, T=7):
    """x as large as `size`, weight, peephole and initial state of a batch of 2, or of a pack."""
    cell = CELLS[variant]
    rows, shape = (2, (2, T)) if cu is None else (len(cu) - 1, (1, T))
    torch.manual_seed(0)
    peephole = None if variant == "NP" else torch.randn(len(cell.gates), n)
    return [
        size * torch.randn(*shape, cell.blocks * n), torch.randn(cell.blocks * n, n), peephole,
        min(size, 1) * torch.randn(rows, 2 * n),
    ]  # fmt: skip


def evaluate(variant, tensors, cu, backend, dtype):
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in tensors]
    *args, state = leaves
    cu_seqlens = None if cu is None else torch.tensor(cu)
    y, final = lstm(
        *args, variant=variant, initial_state=state, cu_seqlens=cu_seqlens, backend=backend, chunk_size=3
    )
    total = (y.double() * y.detach().double().cos()).sum() + final.double().sin().sum()
    wanted = [leaf for leaf in leaves if leaf is not None]
    return y, final, *torch.autograd.grad(total, wanted)


@pytest.mark.parametrize("size", [1e-4, 1, 30])
@pytest.mark.parametrize("cu", [None, [0, 0, 2, 6]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law_8(variant, cu, size):
    tensors = inputs(variant, cu, size)
    found, reference, exact = (
        evaluate(variant, tensors, cu, *how)
        for how in (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    )
    for value, plain, right in zip(found, reference, exact, strict=True):
        precision.check_close(value, right, plain, dtype=torch.float32, name=variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_cells_than_a_program_has(variant):
    tensors = inputs(variant, None, 1, n=100, T=2)
    found, plain = (evaluate(variant, tensors, None, how, torch.float32) for how in ("triton", "torch"))
    exact = evaluate(variant, tensors, None, "torch", torch.float64)
    for value, near, right in zip(found, plain, exact, strict=True):
        precision.check_close(value, right, near, dtype=torch.float32, name=variant)


def test_what_it_does_not_serve_is_refused():
    x, weight, *_ = inputs("V", None, 1)
    with pytest.raises(ValueError, match=r"lstm: backend 'triton' can't be used: .*float32, and x is"):
        lstm(x.double(), weight.double(), backend="triton")
    with pytest.raises(ValueError, match=r"lstm: backend 'triton' can't be used: .*variant 'FGR'.*torch"):
        lstm(x, torch.randn(20, 20), variant="FGR", backend="triton")


def test_auto_takes_it():
    *tensors, state = inputs("V", None, 1)
    ours, auto = (lstm(*tensors, initial_state=state, backend=backend)[0] for backend in ("triton", "auto"))
    assert torch.equal(ours, auto)
