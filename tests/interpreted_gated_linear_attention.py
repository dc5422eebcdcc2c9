"""gated_linear_attention's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import pytest
import torch
from op_cases import check
from test_gated_linear_attention import TestGatedLinearAttention as Attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PACKS = [[0, 0, 9, 26, 40], [0, 1, 2, 3, 21], [0, 7, 21, 21], [0, 0]]


@pytest.mark.parametrize("mode", ["chunked", "recurrent"])
@pytest.mark.parametrize("T", [0, 1, 16, 37])
@pytest.mark.parametrize("variant", Attention.variants)
def test_law_8(variant, T, mode):
    for state in (False, True):
        case = Attention().make(variant, T=T, size=5, state=state, B=1)
        check(case, "triton", mode, torch.float32, chunk_size=16)
    check(Attention().make(variant, T=T, size=3), "triton", mode, torch.float16, layout="strided")


@pytest.mark.parametrize("variant", ["channel", "head", "none"])
@pytest.mark.parametrize("gate", ["mild", "near_one"])
def test_mild_gates(variant, gate):
    for dtype in (torch.float32, torch.float16):
        check(Attention().make(variant, T=70, size=4, gate=gate, B=1), "triton", "chunked", dtype)


@pytest.mark.parametrize("cu", PACKS)
@pytest.mark.parametrize("variant", ["channel grouped", "head", "none", "constant"])
def test_packing(variant, cu):
    case = Attention().make(variant, T=cu[-1] + 3, B=1, size=3, cu=cu)
    check(case, "triton", "chunked", torch.float32, chunk_size=16)
    check(case, "triton", "recurrent", torch.float32)


@pytest.mark.parametrize("variant", ["channel", "head"])
def test_heads_wider_than_a_tile(variant, monkeypatch):
    from seqzoo_kernels.gated_linear_attention import triton as backend

    tiles = dict.fromkeys(backend.TILES[4], (16, 16, 4, 1))
    monkeypatch.setattr(backend, "TILES", {2: tiles, 4: tiles})
    check(Attention().make(variant, T=20, size=35, B=1), "triton", "chunked", torch.float32)


def test_splitting():
    case = Attention().make("channel", T=50, size=5, B=1)
    check(case, "triton", "chunked", torch.float32, cuts=[1, 13, 13, 40])


def test_expanded_gradients():
    check(Attention().make("channel", T=20, size=5), "triton", "chunked", torch.float32, cotangents="sum")


@pytest.mark.parametrize(
    ("dtype", "mode", "why"), [(torch.float64, "chunked", "float64"), (torch.float32, "parallel", "chunks")]
)
def test_what_it_does_not_serve_is_refused(dtype, mode, why):
    case = Attention().make("channel", T=3)
    with pytest.raises(ValueError, match=rf"gated_linear_attention: backend 'triton' can't be used: .*{why}"):
        case.run(case.cast(dtype), backend="triton", mode=mode)


def test_auto_takes_it():
    inputs = (case := Attention().make("channel", T=20, size=5)).cast(torch.float32)
    assert torch.equal(case.run(inputs, backend="triton")["out"], case.run(inputs)["out"])
