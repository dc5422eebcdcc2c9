"""attention's backends that other libraries compute: how they are chosen, and that they are asked for the same thing."""

import subprocess
import sys

import pytest
import torch
from op_cases import Case, check, named
from test_attention_op import TestAttention as Attention
from test_attention_op import qkv
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqzoo_kernels import attention, precision, use_backend
from seqzoo_kernels.attention import BACKENDS, sdpa, xformers
from seqzoo_kernels.attention.reference import visible_keys


@pytest.fixture
def masks():
    return pytest.importorskip("xformers.ops").fmha.attn_bias


@pytest.fixture
def written_out(masks, monkeypatch):
    """What memory_efficient_attention is said to compute, with its masks written out, on a CPU."""

    def computed(q, k, v, bias, *, scale):
        assert q.shape[2:3] == k.shape[2:3] == v.shape[2:3]
        scores = torch.einsum("bihk,bjhk->bhij", q.float(), k.float()) * scale
        scores = scores + bias.materialize((q.shape[1], k.shape[1]), device=q.device)
        return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v.float()).to(v.dtype)

    monkeypatch.setattr(xformers.operators(), "memory_efficient_attention", computed)
    refusal = xformers.refusal

    def refusal_but_for_the_gpu(*args):
        reason = refusal(*args)
        return None if reason and "GPU" in reason else reason

    monkeypatch.setattr(xformers, "refusal", refusal_but_for_the_gpu)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("lengths", [[12], [5, 1, 6]])
def test_masks_of_xformers_are_ours(masks, window, lengths):
    mask = xformers.mask(lengths, window, torch.device("cpu")).materialize((12, 12))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    ours = visible_keys(place, place, window)[0] & (sequence[:, None] == sequence)
    assert torch.equal(mask, torch.where(ours, 0.0, -torch.inf))


@pytest.mark.parametrize("T", [0, 1, 7, 33])
@pytest.mark.parametrize("variant", ["plain", "window=4", "grouped scaled", "grouped window=20"])
def test_xformers_is_asked_for_the_same(written_out, variant, T):
    if T != 1:  # a step's gradients are refused
        check(Attention().make(variant, T=T, state=False), "xformers", "auto", torch.float32)
        check(
            Attention().make(variant, T=T, state=False), "xformers", "auto", torch.float16, layout="strided"
        )


@pytest.mark.parametrize("cu", [[0, 0, 13, 20, 37], [0, 10, 10, 15, 37, 37], [3, 5, 21], [0, 0]])
@pytest.mark.parametrize("variant", ["plain", "grouped window=4"])
def test_xformers_takes_packs_as_they_come(written_out, variant, cu):
    case = Attention().make(variant, T=cu[-1] + 3, B=1, cu=cu, state=False)
    for x in case.inputs.values():
        x[:, : cu[0]] = torch.nan
    inputs = case.cast(torch.float32)
    ours, reference = case.run(inputs, backend="xformers"), case.run(inputs, backend="reference")
    exact = case.run({n: x.double() for n, x in inputs.items()}, backend="reference")
    precision.check_close(ours["out"], exact["out"], reference["out"], dtype=torch.float32, name="out")
    assert torch.equal(ours["final.k"], reference["final.k"])
    assert (ours["out"][:, : cu[0]] == 0).all() and (ours["out"][:, cu[-1] :] == 0).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"log_decay": torch.zeros(1, 3, 2)}, "without a decay"),
        ({"mode": "chunked"}, "mode 'chunked'"),
        ({"dtype": torch.float64}, "float64"),
        ({}, r"needs a GPU, and q is on cpu.*Others: sdpa, triton, torch, reference"),
    ],
)
def test_what_xformers_does_not_serve_is_refused(masks, change, why):
    q, k, v = qkv(1, T=3, dtype=change.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=rf"attention: backend 'xformers' can't be used: .*{why}"):
        attention(q, k, v, backend="xformers", **change)


def test_xformers_refuses_a_cache(masks):
    q, k, v = qkv(1, T=3, dtype=torch.float32)
    _, state = attention(q, k, v)
    with pytest.raises(ValueError, match="without a cache"):
        attention(q, k, v, initial_state=state, backend="xformers")


def test_its_own_refusal_is_passed_on(masks):
    q, k, v = qkv(1, T=3, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"attention: backend 'xformers' can't be used: No operator found"):
        xformers.forward(q, k, v, 1.0, 0, None)


def test_without_xformers(monkeypatch):
    monkeypatch.setattr(xformers, "_installed", False)
    q, k, v = qkv(1, T=3)
    with pytest.raises(ValueError, match="xformers is not installed"), use_backend("xformers"):
        attention(q, k, v)


def test_xformers_comes_when_it_is_called():
    code = (
        "import sys, torch; from seqzoo_kernels import attention; q = torch.zeros(1, 3, 2, 4); "
        "attention(q, q, q); sys.exit('xformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_never_takes_xformers():
    """The reference, which serves every call, stands before it."""
    assert list(BACKENDS)[-2:] == ["reference", "xformers"]


def test_the_fastest_sdpa_first(monkeypatch):
    """cuDNN for long half-precision passes on a GPU, whatever torch's order, but for one that a user has chosen."""
    monkeypatch.setattr(sdpa, "_suits_cudnn", lambda q, v: True)
    seen = []
    real = F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(torch._C._get_sdp_priority_order())
        return real(*args, **kwargs)

    q, k, v = qkv(1, T=6, dtype=torch.float32)
    order = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attention(q, k, v, backend="sdpa")
    assert seen[0][:4] == [int(choice) for choice in sdpa.FASTEST_FIRST]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        attention(q, k, v, backend="sdpa")
    assert seen[1] == order == torch._C._get_sdp_priority_order()


def test_choosing_among_sdpa_does_not_break_a_graph(monkeypatch):
    monkeypatch.setattr(sdpa, "_suits_cudnn", lambda q, v: True)
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (6, 9):
        inputs = dict(zip("qkv", qkv(1, T=T), strict=True))
        case = Case("attention", inputs, {})
        check(case, "sdpa", "auto", torch.float32, compiled=lambda leaves: named(*compiled(**leaves)))


@pytest.mark.parametrize("prune", [0.0, 1.0, -1.0])
def test_wrong_prune(prune):
    q, k, v = qkv(1, T=3)
    with pytest.raises(ValueError, match=rf"attention: expected prune to lie between 0 and 1, got {prune}"):
        attention(q, k, v, prune=prune)


def test_exact_backends_serve_pruning():
    q, k, v = qkv(1, T=9, dtype=torch.float32)
    g = torch.full((1, 9, 2), -3.0)
    for backend in ("torch", "reference", "auto"):
        one, two = (attention(q, k, v, g, backend=backend, prune=p)[0] for p in (None, 0.5))
        assert torch.equal(one, two)
