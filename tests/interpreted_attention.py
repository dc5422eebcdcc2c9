"""attention's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import pytest
import torch
from op_cases import check
from test_attention_op import TestAttention as Attention

from seqzoo_kernels.attention import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")
VARIANTS = Attention.variants
PACKS = [[0, 0, 13, 20, 37], [0, 1, 2, 3, 40], [0, 0]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks, several tiles and a part of each, at lengths that the interpreter can bear."""
    tile = backend.Tile(32, 16, 4, 1)
    monkeypatch.setattr(backend, "tiling", lambda q, v, name: tile)


@pytest.mark.parametrize("T", [0, 1, 7, 65])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law_8(variant, T):
    for state in (False, True):
        case = Attention().make(variant, T=T, state=state)
        if T == 1:
            inputs = case.cast(torch.float32)
            with torch.no_grad():
                ours = case.run(inputs, backend="triton")["out"]
                exact = case.run({n: x.double() for n, x in inputs.items()}, backend="reference")["out"]
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
        else:
            check(case, "triton", "parallel", torch.float32)
    if T != 1:
        check(Attention().make(variant, T=T), "triton", "parallel", torch.float16, layout="strided")


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packing(variant, cu):
    case = Attention().make(variant, T=cu[-1] + 3, B=1, state=True, cu=cu)
    check(case, "triton", "parallel", torch.float32)


@pytest.mark.parametrize("variant", ["decay", "decay grouped window=20"])
def test_splitting(variant):
    check(Attention().make(variant, T=80), "triton", "parallel", torch.float32, cuts=[2, 35, 37])
