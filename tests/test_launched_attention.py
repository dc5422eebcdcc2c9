"""What attention launches on a GPU, compiled for sm_90 without one."""

import hopper
import pytest
import torch

from seqzoo_kernels import AttentionState, DecayAttentionState, attention
from seqzoo_kernels.attention import appending
from seqzoo_kernels.attention import triton as backend

PASSES = {"forward_kernel", "query_kernel", "key_kernel"}


def call(dtype, size, *, length=130, groups=8, decay=False, older=0, window=0, prune=0.0):
    """The arguments of a pass of 8 heads: `older` tokens in a cache, whose decays are a bias."""
    q = torch.zeros(2, length, 8, size, dtype=dtype)
    k = torch.zeros(2, older + length, groups, size, dtype=dtype)
    place = torch.arange(older + length).expand(2, -1).contiguous()
    gates = torch.zeros(2, length, 8) if decay else None
    bias = torch.zeros(2, older + length, 8) if decay and older else None
    return q, k, k, gates, bias, place[:, older:].contiguous(), place, 1.0, window, 0, prune


@pytest.mark.parametrize(
    ("dtype", "size", "options"),
    [
        (torch.bfloat16, 128, {"decay": True}),
        (torch.float16, 64, {"decay": True, "groups": 4, "older": 70, "window": 60, "prune": 1e-3}),
        (torch.float32, 64, {}),
    ],
    ids=["bfloat16", "float16, all options", "float32"],
)
def test_both_passes(dtype, size, options, tmp_path, monkeypatch):
    """In each dtype with the tiles of that dtype; products of half precision on the tensor cores, warps together."""
    given = call(dtype, size, **options)
    with hopper.launches(monkeypatch, tmp_path) as found:
        out, lse = backend.forward(*given)
        backend.backward(out, lse, out, lse, *given)
    decays = {"decay_kernel"} if options else set()
    assert {built.metadata.name for built in found} == {*PASSES, "product_kernel", *decays}
    for built in found:
        name = built.metadata.name
        assert built.asm["cubin"]
        assert built.metadata.shared <= hopper.SHARED_MEMORY, name
        if name in PASSES:
            assert ("wgmma.mma_async" in built.asm["ptx"]) == (dtype != torch.float32), name


def test_a_step(tmp_path, monkeypatch):
    """Of grouped heads with a gate, a bias and a window."""
    given = call(torch.bfloat16, 128, length=1, groups=2, decay=True, older=300, window=200)
    with hopper.launches(monkeypatch, tmp_path) as found:
        backend.forward(*given)
    assert [built.metadata.name for built in found] == ["part_kernel", "whole_kernel"]
    for built in found:
        assert built.asm["cubin"]
        assert built.metadata.shared <= hopper.SHARED_MEMORY


@pytest.mark.parametrize("window", [0, 300])
def test_a_token_appended(window, tmp_path, monkeypatch):
    state = AttentionState(*[torch.zeros(2, 300, 2, 128, dtype=torch.bfloat16)] * 2, torch.zeros(2).long())
    if not window:
        state = DecayAttentionState(*state, torch.zeros(2, 300, 8))
    k = torch.zeros(2, 1, 2, 128, dtype=torch.bfloat16)
    gates = None if window else torch.zeros(2, 1, 8)
    with hopper.launches(monkeypatch, tmp_path) as found:
        appending.append_(state, k, k, gates, window, 300)
    assert [built.metadata.name for built in found] == ["append_kernel"]
    assert found[0].asm["cubin"]


def test_a_gpu_is_needed():
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(
        ValueError, match=r"attention: backend 'triton' can't be used: it needs a GPU, and q.*cpu"
    ):
        attention(q, q, q, backend="triton")
