"""lstm and gru by torch's fused kernels, on a CPU in the place of a GPU: the same code, but for cuDNN under it."""

import copy
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqzoo
from seqzoo.testing import check_mixer
from seqzoo_kernels import fused_rnn, precision, use_backend
from seqzoo_kernels.lstm import CELLS

B, T, D = 2, 21, 16
OPTIONS = {"lstm": {"variant": "NP"}, "gru": {}}
each = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Pretend that the device has both kernels; a list of the calls that reach them, with the precision of products there."""
    calls = []

    def seen(function):
        def call(*args):
            calls.append(torch.backends.cudnn.rnn.fp32_precision)
            y, *last = function(*args)
            if y.requires_grad:
                y.register_hook(lambda grad: calls.append(torch.backends.cudnn.rnn.fp32_precision))
            return y, *last

        return call

    monkeypatch.setattr(fused_rnn, "_has_kernel", lambda op, x, length: True)
    for name in OPTIONS:
        monkeypatch.setattr(torch, name, seen(getattr(torch, name)))
    return calls


def made(name, dtype=torch.float32, **options):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, D, **OPTIONS[name], **options).to(dtype)
    x = torch.randn(B, T, D).to(dtype)
    state = type(mixer.init_state(0))(*(torch.randn_like(leaf) for leaf in mixer.init_state(B)))
    return mixer, x, state


def evaluate(mixer, x, state, around=lambda call: call, **pack):
    """y, the final state, and the gradients of both with respect to everything."""
    x = x.detach().requires_grad_()
    state = type(state)(*(leaf.detach().requires_grad_() for leaf in state))
    y, final = around(lambda: mixer(x, state, **pack))()
    outs = {"y": y, **{f"final {key}": leaf for key, leaf in final._asdict().items() if leaf.numel()}}
    wanted = {"x": x, **state._asdict(), **dict(mixer.named_parameters())}
    wanted = {key: leaf for key, leaf in wanted.items() if leaf.numel()}
    total = sum((out.double() * out.detach().double().cos()).sum() for out in outs.values())
    grads = torch.autograd.grad(total, list(wanted.values()))
    return outs | {f"d {key}": grad for key, grad in zip(wanted, grads, strict=True)}


@each
@pytest.mark.parametrize("expand", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_law_8(name, expand, dtype, kernels):
    mixer, x, state = made(name, dtype, expand=expand)
    found = evaluate(mixer, x, state)
    assert kernels == ["ieee", "ieee"]
    with use_backend("reference"):
        reference = evaluate(mixer, x, state)
        exact = evaluate(
            copy.deepcopy(mixer).double(), x.double(), type(state)(*(leaf.double() for leaf in state))
        )
    assert len(kernels) == 2
    for key, value in found.items():
        assert value.dtype == reference[key].dtype
        precision.check_close(value, exact[key], reference[key], dtype=dtype, name=key)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_seqlen", [None, 9])
def test_packs(name, dtype, max_seqlen, kernels):
    """Two empty sequences, one of them at the end, and tokens outside all."""
    pack = {"cu_seqlens": torch.tensor([1, 1, 9, 10, 19, 19]), "max_seqlen": max_seqlen}
    mixer, x, _ = made(name, dtype)
    x = x[:1]
    state = type(mixer.init_state(0))(*(torch.randn_like(leaf) for leaf in mixer.init_state(5)))
    found = evaluate(mixer, x, state, **pack)
    assert kernels == ["ieee", "ieee"]
    if name == "lstm":
        assert torch.equal(found["final c"][[0, 4]], state.c[[0, 4]])
    with use_backend("reference"):
        reference = evaluate(mixer, x, state, **pack)
        exact = evaluate(mixer.double(), x.double(), type(state)(*(leaf.double() for leaf in state)), **pack)
    for key, value in found.items():
        assert value.dtype == reference[key].dtype
        precision.check_close(value, exact[key], reference[key], dtype=dtype, name=key)


@each
def test_the_laws(name, kernels):
    laws = "modes_agree splitting causality packing padding rows state_value precision extremes".split()
    assert check_mixer(name, options=OPTIONS[name], laws=laws)
    assert kernels


@each
def test_the_flag_outside_is_as_it_was(name, kernels):
    mixer, x, state = made(name)
    rnn = torch.backends.cudnn.rnn
    for before in ("tf32", "ieee"):
        outside, rnn.fp32_precision = rnn.fp32_precision, before
        try:
            evaluate(mixer, x, state)
            assert rnn.fp32_precision == before
        finally:
            rnn.fp32_precision = outside
    assert set(kernels) == {"ieee"}


@each
def test_what_it_must_not_serve(name, kernels):
    mixer, x, state = made(name)
    mixer(x, state, mode="chunked")
    mixer(x, state, mode="recurrent")
    mixer(x[:1, :4], cu_seqlens=torch.tensor([0, 0]))
    mixer(x[:1], cu_seqlens=torch.tensor([0]))
    mixer.step(x[:, 0], state)
    mixer(x[:, :0], state)
    mixer(x[:0])
    copy.deepcopy(mixer).double()(x.double())
    for backend in ("torch", "reference"):
        with use_backend(backend):
            mixer(x)
    with FlopCounterMode(display=False):
        mixer(x)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # as of the loops
        torch.func.grad(lambda x: mixer(x)[0].sum())(x)
    torch.compile(mixer, backend="eager", fullgraph=True)(x)
    hooked = copy.deepcopy(mixer)
    hooked.in_proj.register_forward_hook(lambda module, args, out: 2 * out)
    assert not torch.equal(hooked(x)[0], mixer(x, mode="chunked")[0])
    replaced = copy.deepcopy(mixer)
    replaced.in_proj = torch.nn.Sequential(replaced.in_proj, torch.nn.Tanh())
    replaced(x)
    if name == "lstm":
        for variant in set(CELLS) - {"NP"}:
            seqzoo.create_mixer("lstm", D, variant=variant)(x)
    assert kernels == []
    mixer(x)
    assert len(kernels) == 1


@each
def test_second_derivatives(name, kernels):
    """Of a penalty on all gradients, as a user would write it."""

    def penalty(mixer, x, state):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *state)]
        x, *state = leaves
        wanted = [leaf for leaf in leaves if leaf.numel()] + list(mixer.parameters())
        y, final = mixer(x, type(mixer.init_state(0))(*state))
        total = y.square().sum() + sum(leaf.sin().sum() for leaf in final)
        grads = torch.autograd.grad(total, wanted, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted)

    mixer, x, state = made(name)
    found = penalty(mixer, x, state)
    assert kernels == ["ieee", "ieee"]
    with use_backend("reference"):
        reference = penalty(mixer, x, state)
        exact = penalty(mixer.double(), x.double(), [leaf.double() for leaf in state])
    for got, right, plain in zip(found, exact, reference, strict=True):
        precision.check_close(got, right, plain, dtype=torch.float32, name="second derivative")


@each
def test_batched_gradients(name):
    mixer, x, _ = made(name)
    x.requires_grad_()
    cotangents = torch.randn(3, B, T, D)
    (batched,) = torch.autograd.grad(mixer(x)[0], x, cotangents, is_grads_batched=True)
    for row, cotangent in zip(batched, cotangents, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(mixer(x)[0], x, cotangent)[0])


@each
def test_checkpointing_and_offloading(name, kernels):
    mixer, x, state = made(name)
    plain = evaluate(mixer, x, state)

    def offloaded(call):
        def run():
            with torch.autograd.graph.save_on_cpu():
                return call()

        return run

    for around in (lambda call: lambda: checkpoint(call, use_reentrant=False), offloaded):
        kernels.clear()
        for key, value in evaluate(mixer, x, state, around=around).items():
            assert torch.equal(value, plain[key]), key
        assert kernels


@each
def test_what_is_kept_goes_with_backward(name):
    mixer, x, _ = made(name)
    kept = weakref.WeakSet()

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor
            kept.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        y = mixer(x)[0]
    assert kept
    (first,) = torch.autograd.grad(y.sum(), mixer.recurrent_weight, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), mixer.recurrent_weight)
    assert torch.equal(first, second)
    assert not kept
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@each
def test_frozen_weights_and_a_lone_final_state(name, kernels):
    mixer, x, state = made(name)
    everything = mixer(x, state)[1]
    mixer.requires_grad_(False)
    x.requires_grad_()
    got = torch.autograd.grad(mixer(x, state)[1][0].sum(), x)[0]
    right = torch.autograd.grad(mixer(x, state, mode="chunked")[1][0].sum(), x)[0]
    torch.testing.assert_close(got, right)
    with torch.no_grad():
        for leaf, kept in zip(mixer(x, state)[1], everything, strict=True):
            torch.testing.assert_close(leaf, kept)
            assert leaf.is_contiguous()
            assert leaf.untyped_storage().nbytes() == leaf.nbytes
    assert len(kernels) == 3


@each
def test_autocast_computes_in_float32(name, kernels):
    mixer, x, state = made(name)
    plain = evaluate(mixer, x, state)
    with torch.autocast("cpu", torch.bfloat16):
        under = evaluate(mixer, x, state)
    assert len(kernels) == 4
    for key, value in plain.items():
        assert torch.equal(under[key], value), key


@each
def test_weights_lie_as_cudnn_wants_them(name, monkeypatch):
    """A stand-in for cuDNN's function, which moves the tensors it is given into one buffer, and so must get copies."""
    mixer, x, state = made(name)
    bias = torch.randn_like(mixer.in_proj.bias)
    own = [x, mixer.in_proj.weight, mixer.in_proj.bias, mixer.recurrent_weight, bias, *state]
    before = [(t.data_ptr(), t._version) for t in own]

    def flatten(weights, *options):
        assert options == (4, D, name.upper(), D, 0, 1, True, False)
        buffer = torch.cat([w.reshape(-1) for w in weights])
        for w, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
            w.set_(part.view(w.shape))

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    monkeypatch.setattr(fused_rnn.cudnn_rnn, "get_cudnn_mode", lambda mode: mode)
    leaves = fused_rnn._laid_out(name, own)
    for leaf, tensor in zip(leaves, own, strict=True):
        assert torch.equal(leaf, tensor)
    order = [leaves[k] for k in (1, 3, 2, 4)]  # both matrices, then both biases
    offsets = [0, *itertools.accumulate(w.numel() for w in order)]
    assert [w.storage_offset() for w in order] == offsets[:-1]
    assert len({w.untyped_storage().data_ptr() for w in order}) == 1
    assert [(t.data_ptr(), t._version) for t in own] == before
