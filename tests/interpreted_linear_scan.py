"""linear_scan's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import pytest
import torch
from op_cases import check
from test_linear_scan import TestLinearScan as Scan

from seqzoo_kernels.linear_scan import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")
REAL = ["real", "constant", "reverse"]
PACKS = [[0, 0, 9, 14, 21], [0, 1, 2, 3, 21], [0, 7, 21, 21], [0, 0]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, several segments and a part of each, at lengths that the interpreter can bear."""

    def tiling(x, mode, backward, turning):
        tile = (1, 1, 8, 2) if x.shape[1] == 1 else (1, 7, 4, 2) if mode == "recurrent" else (2, 4, 4, 2)
        return backend.Tile(*tile, 1)

    monkeypatch.setattr(backend, "_tile_of", tiling)


@pytest.mark.parametrize("mode", ["parallel", "recurrent"])
@pytest.mark.parametrize("T", [0, 1, 7, 8, 21])
@pytest.mark.parametrize("variant", REAL)
def test_law_8(variant, T, mode):
    for state in (False, True):
        check(Scan().make(variant, T=T, size=3, state=state), "triton", mode, torch.float32)
    check(Scan().make(variant, T=T, size=3), "triton", mode, torch.float16, layout="strided")


@pytest.mark.parametrize(
    ("variant", "T", "mode", "state"),
    [
        ("rotated", 21, "parallel", True),
        ("rotated", 7, "recurrent", False),
        ("rotated", 1, "recurrent", True),
        ("rotated varying complex", 21, "parallel", False),
        ("rotated varying complex", 0, "parallel", True),
        ("rotated constant reverse", 21, "parallel", True),
    ],
)
def test_law_8_of_complex_states(variant, T, mode, state):
    check(Scan().make(variant, T=T, size=3, state=state), "triton", mode, torch.float32)
    check(Scan().make(variant, T=min(T, 9), size=3), "triton", mode, torch.float16, layout="strided")


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("variant", REAL)
def test_packing(variant, cu):
    for state in (False, True):
        case = Scan().make(variant, T=cu[-1] + 3, B=1, size=3, state=state, cu=cu)
        check(case, "triton", "parallel", torch.float32)


@pytest.mark.parametrize(
    ("variant", "state"),
    [("rotated", True), ("rotated varying complex", False), ("rotated constant reverse", True)],
)
def test_packing_of_complex_states(variant, state):
    case = Scan().make(variant, T=17, B=1, size=3, state=state, cu=[0, 0, 1, 2, 14])
    check(case, "triton", "parallel", torch.float32)


def test_a_phase_that_is_nan_shows():
    case = Scan().make("rotated", T=3)
    inputs = case.cast(torch.float32)
    inputs["phase"][1] = torch.nan
    out = case.run(inputs, backend="triton")["out"]
    assert out[..., 1].isnan().all() and out[..., [0, 2]].isfinite().all()


def test_splitting():
    check(Scan().make("real", T=30, size=5), "triton", "parallel", torch.float32, cuts=[1, 13, 13, 29])


def test_expanded_gradients():
    check(Scan().make("real", T=20, size=5), "triton", "parallel", torch.float32, cotangents="sum")


@pytest.mark.parametrize("variant", ["real", "rotated varying complex"])
def test_what_it_does_not_serve_is_refused(variant):
    case = Scan().make(variant, T=3)
    with pytest.raises(ValueError, match=r"linear_scan: backend 'triton' can't be used: .*float32, and x is"):
        case.run(case.cast(torch.float64), backend="triton")


def test_auto_takes_it():
    case = Scan().make("real", T=20, size=5)
    inputs = case.cast(torch.float32)
    ours, auto = case.run(inputs, backend="triton"), case.run(inputs)
    assert torch.equal(ours["out"], auto["out"])
