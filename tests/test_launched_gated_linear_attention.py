"""What gated_linear_attention launches on a GPU, compiled for sm_90 without one."""

import hopper
import pytest
import torch

from seqzoo_kernels import gated_linear_attention
from seqzoo_kernels.gated_linear_attention import triton as backend


@pytest.mark.parametrize(
    ("dtype", "width", "per"),
    [
        (torch.bfloat16, 128, "channel"),
        (torch.bfloat16, 64, "head"),
        (torch.bfloat16, 512, "head"),
        (torch.float32, 64, "channel"),
    ],
    ids=str,
)
def test_both_passes(dtype, width, per, tmp_path, monkeypatch):
    """Every kernel of both passes, in the tiles that it is launched with: they fit, and products are on the tensor cores. Gates
    a head are those of a pack."""
    x = torch.zeros(1, 130, 2, width, dtype=dtype)
    log_decay = torch.zeros(x.shape if per == "channel" else x.shape[:3])
    cu = torch.tensor([0, 30, 130]) if per == "head" else None
    call = (x, x, x, log_decay, None, cu, 1.0, "chunked", 0)
    with hopper.launches(monkeypatch, tmp_path) as found:
        out, final = backend.forward(*call)
        backend.backward(out, final, out, final, *call)
    assert len({built.metadata.name for built in found}) == 5
    for built in found:
        assert built.asm["cubin"]
        assert built.metadata.shared < hopper.SHARED_MEMORY, built.metadata.name
        assert "wgmma.mma_async" in built.asm["ptx"], built.metadata.name


def test_a_long_row(tmp_path, monkeypatch):
    """Gone through in parts: the passes over states are launched twice, first for the ends of the parts."""
    x = torch.zeros(1, 20000, 2, 128, dtype=torch.bfloat16)
    call = (x, x, x, torch.zeros(x.shape), None, None, 1.0, "chunked", 0)
    assert backend.Call.of(x, x, x, call[3], None, 0).parts > 2
    with hopper.launches(monkeypatch, tmp_path) as found:
        out, final = backend.forward(*call)
        backend.backward(out, final, out, final, *call)
    names = [built.metadata.name for built in found]
    assert (names.count("states_kernel"), names.count("d_states_kernel")) == (4, 2)
    assert all(built.metadata.shared < hopper.SHARED_MEMORY for built in found)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step(packed, tmp_path, monkeypatch):
    x = torch.zeros(1, 3, 2, 128, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1, 3]) if packed else None
    state = torch.zeros(2 if packed else 1, 2, 128, 128)
    with hopper.launches(monkeypatch, tmp_path) as found:
        backend.forward(x, x, x, torch.zeros(x.shape), state, cu, 1.0, "recurrent", 0)
    (built,) = found
    assert built.asm["cubin"]


def test_a_gpu_is_needed():
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(
        ValueError,
        match=r"gated_linear_attention: backend 'triton' can't be used: it needs a GPU.*cpu.*torch",
    ):
        gated_linear_attention(q, q, q, backend="triton")
