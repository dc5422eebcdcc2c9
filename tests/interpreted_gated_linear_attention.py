"""gated_linear_attention's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import numpy as np
import pytest
import torch
import triton.language as tl
from op_cases import check
from test_gated_linear_attention import TestGatedLinearAttention as Attention
from test_gated_linear_attention import call_with
from triton.runtime import interpreter

from seqzoo_kernels.gated_linear_attention import triton as backend

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SINGLE, HALF = torch.float32, torch.bfloat16
GATES = ["channel", "head", "constant", "none"]
PACK = [0, 0, 9, 26, 27, 27]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    """As a GPU has it: the interpreter rounds it towards 0, and multiplies its bits as whole numbers."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)

    def product(self, a, b, d, *options):
        return dot(self, *(wide(self, t) for t in (a, b)), d, *options)

    def wide(builder, t):
        return builder.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)


@pytest.fixture
def small_tiles(monkeypatch):
    small = {name: (16, 16, *rest) for name, (_, _, *rest) in backend.TILES[4].items()}
    monkeypatch.setattr(backend, "TILES", {2: small, 4: small})


def test_bfloat16_is_rounded_as_torch_does():
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, 1e-40])])
    bits = interpreter._convert_float(x.numpy(), tl.float32, tl.bfloat16, None)
    assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("variant", GATES)
def test_law_8(variant, dtype):
    """Gates of all kinds side by side, 0 to -inf; widths that no tile has; a last chunk that is not full."""
    case = Attention().make(variant, T=37 if dtype == SINGLE else 20, size=5, B=1)
    result = check(case, "triton", "chunked", dtype, chunk_size=16)
    if variant in ("channel", "head"):
        assert (result["d_log_decay"][case.inputs["log_decay"] == -torch.inf] == 0).all()
    if dtype == HALF:
        check(case, "triton", "recurrent", dtype)


@pytest.mark.parametrize("variant", ["channel grouped", "head grouped scaled"])
def test_shared_heads(variant):
    check(Attention().make(variant, T=20, size=5, B=1), "triton", "chunked", SINGLE, chunk_size=16)


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("mode", ["chunked", "recurrent"])
def test_few_tokens(T, mode):
    for state in (False, True):
        check(Attention().make("channel", T=T, size=3, B=1, state=state), "triton", mode, SINGLE)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("variant", ["channel", "head"])
def test_decays_near_one(variant, dtype):
    case = Attention().make(variant, T=33, size=4, gate="near_one", B=1)
    check(case, "triton", "chunked", dtype, chunk_size=16)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("variant", GATES)
def test_rows_in_parts(variant, dtype, monkeypatch):
    """Few rows of many chunks: 7 of them in 4 parts, of which the last has one; gates of all kinds, both states."""
    monkeypatch.setattr(backend, "LEAST", 1)
    monkeypatch.setattr(backend, "PROGRAMS", 4)
    case = Attention().make(variant, T=110, size=5, B=1)
    inputs = case.cast(dtype)
    call = backend.Call.of(*(inputs[n] for n in "qkv"), inputs.get("log_decay"), None, 16)
    assert (call.count, call.parts) == (7, 4)
    check(case, "triton", "chunked", dtype, chunk_size=16)


def test_mild_and_strong_chunks(small_tiles):
    """Half-precision chunks go two ways; here both happen in one call, in either order, by any of the channels' tiles."""
    log_decay = -0.2 * torch.rand(1, 64, 1, 20, generator=torch.Generator().manual_seed(0)).double()
    log_decay[:, 20, :, 3] = -1e9
    log_decay[:, 21, :, 18] = -torch.inf
    log_decay[:, 50:54, :, 18] = -50.0
    for dtype in (HALF, torch.float16):
        check(call_with(log_decay, K=20, V=4), "triton", "chunked", dtype, chunk_size=16)


@pytest.mark.parametrize("variant", [*GATES, "channel grouped"])
def test_packing(variant):
    """Boundaries anywhere, also at once behind one another, and tokens of no sequence."""
    case = Attention().make(variant, T=30, B=1, size=3, cu=PACK)
    check(case, "triton", "chunked", SINGLE, chunk_size=16)
    if variant == "channel grouped":
        check(case, "triton", "recurrent", SINGLE)


@pytest.mark.parametrize("mode", ["chunked", "recurrent"])
def test_backwards_in_time(mode):
    """A pack turned round: what stood behind it stands before it."""
    case = Attention().make("channel grouped reverse", T=30, B=1, size=3, cu=PACK)
    check(case, "triton", mode, SINGLE, chunk_size=16)


@pytest.mark.parametrize("T", [3, 40])
@pytest.mark.parametrize("cu", [[0, 0], [0]])
def test_packs_of_nothing(cu, T):
    """Tokens that are in no sequence, more than a chunk of them too."""
    case = Attention().make("channel", T=T, B=1, cu=cu)
    check(case, "triton", "chunked", SINGLE, chunk_size=16)


@pytest.mark.parametrize("variant", ["channel", "head"])
def test_heads_wider_than_a_tile(variant, small_tiles):
    check(Attention().make(variant, T=20, size=35, B=1), "triton", "chunked", SINGLE, chunk_size=16)


def test_splitting():
    case = Attention().make("channel", T=33, size=5, B=1)
    check(case, "triton", "chunked", SINGLE, cuts=[1, 13, 13], chunk_size=16)


def test_strided_inputs_and_expanded_gradients():
    case = Attention().make("channel", T=20, size=5)
    check(case, "triton", "chunked", HALF, layout="strided", cotangents="sum", chunk_size=16)


def test_decoding_equals_the_full_pass():
    case = Attention().make("head", T=6, size=4, gate="mild")
    check(case, "triton", "recurrent", HALF, cuts=list(range(1, 6)))


@pytest.mark.parametrize(
    ("dtype", "mode", "width", "why"),
    [
        (torch.float64, "chunked", 3, "float64"),
        (SINGLE, "parallel", 3, "'parallel'"),
        (SINGLE, "chunked", 513, "K = 513, V = 515"),
    ],
)
def test_what_it_does_not_serve_is_refused(dtype, mode, width, why):
    case = Attention().make("channel", T=3, size=width)
    inputs = case.cast(dtype)
    with pytest.raises(ValueError, match=rf"gated_linear_attention: backend 'triton' can't be used: .*{why}"):
        case.run(inputs, backend="triton", mode=mode)
    case.run(inputs, mode=mode)  # auto goes another way


def test_auto_takes_it():
    case = Attention().make("channel", T=20, size=5)
    inputs = case.cast(SINGLE)
    assert torch.equal(case.run(inputs, backend="triton")["out"], case.run(inputs)["out"])
