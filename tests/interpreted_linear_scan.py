"""linear_scan's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import pytest
import torch
from op_cases import check
from test_linear_scan import TestLinearScan as Scan

from seqzoo_kernels.linear_scan import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PACKS = [[0, 0, 9, 14, 21], [0, 1, 2, 3, 21], [0, 7, 21, 21], [0, 0]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, several segments and a part of each, at lengths that the interpreter can bear."""

    def tiling(x, mode, backward):
        return (1, 1, 8, 2) if x.shape[1] == 1 else (1, 7, 4, 2) if mode == "recurrent" else (2, 4, 4, 2)

    monkeypatch.setattr(backend, "_tiling", tiling)


@pytest.mark.parametrize("mode", ["parallel", "recurrent"])
@pytest.mark.parametrize("T", [0, 1, 7, 8, 21])
@pytest.mark.parametrize("variant", ["real", "constant", "reverse"])
def test_law_8(variant, T, mode):
    for state in (False, True):
        check(Scan().make(variant, T=T, size=3, state=state), "triton", mode, torch.float32)
    check(Scan().make(variant, T=T, size=3), "triton", mode, torch.float16, layout="strided")


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("variant", ["real", "constant", "reverse"])
def test_packing(variant, cu):
    for state in (False, True):
        case = Scan().make(variant, T=cu[-1] + 3, B=1, size=3, state=state, cu=cu)
        check(case, "triton", "parallel", torch.float32)


def test_splitting():
    check(Scan().make("real", T=30, size=5), "triton", "parallel", torch.float32, cuts=[1, 13, 13, 29])


def test_expanded_gradients():
    check(Scan().make("real", T=20, size=5), "triton", "parallel", torch.float32, cotangents="sum")


@pytest.mark.parametrize(
    ("variant", "dtype", "why"), [("rotated", torch.float32, "phase"), ("real", torch.float64, "float64")]
)
def test_what_it_does_not_serve_is_refused(variant, dtype, why):
    case = Scan().make(variant, T=3)
    with pytest.raises(ValueError, match=rf"linear_scan: backend 'triton' can't be used: .*{why}"):
        case.run(case.cast(dtype), backend="triton")


def test_auto_takes_it():
    case = Scan().make("real", T=20, size=5)
    inputs = case.cast(torch.float32)
    ours, auto = case.run(inputs, backend="triton"), case.run(inputs)
    assert torch.equal(ours["out"], auto["out"])
