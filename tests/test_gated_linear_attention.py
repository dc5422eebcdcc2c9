"""gated_linear_attention: the laws of an op, and what is its own."""

import importlib
from types import SimpleNamespace

import oracles
import pytest
import torch
from op_cases import Case, check, gates, has_time, named
from op_laws import OpLaws, each_mode, each_torch_mode

import seqzoo
from seqzoo_kernels import dispatch, gated_linear_attention, precision
from seqzoo_kernels.gated_linear_attention import eager

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestGatedLinearAttention(OpLaws):
    op = "gated_linear_attention"
    variants = [
        "channel",
        "head",
        "none",
        "constant",
        "channel grouped",
        "head grouped scaled",
        "channel grouped reverse",
    ]

    def make(self, variant, *, T, B=2, size=3, seed=0, gate="extreme", state=True, cu=None):
        generator = torch.Generator().manual_seed(seed)
        words = variant.split()
        N, B = (len(cu) - 1, 1) if cu else (B, B)
        K, V = size, size + 2
        G, H = (2, 4) if "grouped" in words else (1, 1) if size > 12 else (2, 2)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inputs = {"q": normal(B, T, H, K), "k": normal(B, T, G, K), "v": normal(B, T, G, V)}
        shape = {"channel": (B, T, G, K), "head": (B, T, G), "constant": (G,)}.get(words[0])
        if shape:
            inputs["log_decay"] = gates(shape, gate, generator)
        if state:
            inputs["initial_state"] = normal(N, G, K, V)
        options = {"scale": 0.7} if "scaled" in words else {}
        if "reverse" in words:
            options["reverse"] = True
        if cu:
            options["cu_seqlens"] = torch.tensor(cu)
            for n, x in inputs.items():
                if n != "initial_state" and x.dim() >= 3:
                    x[:, : cu[0]] = x[:, cu[-1] :] = torch.nan
        return Case(self.op, inputs, options)


def call_with(log_decay, *, K=16, V=16, seed=0, H=1):
    """A case of one row whose log-decay is given, in float64."""
    generator = torch.Generator().manual_seed(seed)
    T = log_decay.shape[1]
    q, k = (torch.randn(1, T, H, K, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, T, H, V, generator=generator, dtype=torch.float64)
    return Case("gated_linear_attention", {"q": q, "k": k, "v": v, "log_decay": log_decay}, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per", ["channel", "head"])
@each_mode
def test_one_closed_gate(backend, mode, per, dtype):
    """-inf at t = 7: the two halves are run separately, every gradient is finite, and the gate's own is 0."""
    generator = torch.Generator().manual_seed(0)
    log_decay = gates((1, 40, 1, 16) if per == "channel" else (1, 40, 1), "mild", generator)
    log_decay[:, 7] = -torch.inf
    case = call_with(log_decay)
    result = check(case, backend, mode, dtype)
    assert (result["d_log_decay"][:, 7] == 0).all()
    inputs = case.cast(dtype)
    second = case.run({n: x[:, 7:] for n, x in inputs.items()}, backend=backend, mode=mode)
    precision.check_close(
        result["out"][:, 7:], second["out"].double(), second["out"], dtype=dtype, name="second half"
    )


@pytest.mark.parametrize("size", [-20.0, -90.0, -1e3, -1e6, -1e9])
@pytest.mark.parametrize("per", ["channel", "head"])
@each_torch_mode
def test_one_large_gate_spoils_no_other(mode, per, size):
    """A float32 cumsum would absorb the gates after a large one."""
    generator = torch.Generator().manual_seed(1)
    log_decay = gates((1, 70, 1, 16) if per == "channel" else (1, 70, 1), "mild", generator)
    log_decay[:, 7] = size
    result = check(call_with(log_decay), "torch", mode, torch.float32)
    assert all(torch.isfinite(x).all() for x in result.values())


@each_torch_mode
def test_strong_gates_at_every_step(mode):
    """Sums of log-decays beyond 90 within a chunk: nothing overflows, the chunk size decides nothing."""
    for per in ((1, 80, 1, 16), (1, 80, 1)):
        log_decay = -20 * torch.rand(per, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        case = call_with(log_decay)
        for chunk_size in (None, 4, 16, 64):
            check(case, "torch", mode, torch.float32, chunk_size=chunk_size)


@each_torch_mode
def test_gates_of_all_kinds_in_one_chunk(mode):
    kinds = torch.tensor([-torch.inf, -1e-6, -1e9, -1e-6, 0.0, -3e-4, -1e-6, -80.0], dtype=torch.float64)
    log_decay = kinds.repeat(10)[None, :, None, None].expand(1, 80, 1, 4).clone()
    log_decay[..., 1] = log_decay[..., 1].roll(3, dims=1)  # channels that close at different times
    log_decay[..., 2] = -1e-6
    for dtype in (torch.float64, torch.float32):
        for case in (call_with(log_decay, K=4), call_with(log_decay[..., 1], K=4)):
            result = check(case, "torch", mode, dtype)
            assert (result["d_log_decay"][torch.isinf(case.inputs["log_decay"])] == 0).all()


@pytest.mark.parametrize("size", [100, 96, 128])
@each_torch_mode
def test_wide_heads(mode, size):
    case = call_with(
        gates((1, 40, 1, size), "mild", torch.Generator().manual_seed(0)), K=size, V=size // 2 + 3
    )
    check(case, "torch", mode, torch.float32, layout="strided")


@each_torch_mode
def test_half_precision_error_does_not_grow_with_length(mode):
    T = 1500
    case = call_with(gates((1, T, 1, 4), "mild", torch.Generator().manual_seed(0)), K=4, V=3)
    inputs = case.cast(torch.bfloat16)
    wide = {n: x.double().numpy() for n, x in inputs.items()}
    out, final = oracles.numpy_gated_linear_attention(**wide)
    ours = case.run(inputs, backend="torch", mode=mode)
    reference = case.run(inputs, backend="reference")
    out, final = torch.from_numpy(out), torch.from_numpy(final)
    for part in (slice(0, 100), slice(T - 100, T)):
        precision.check_close(
            ours["out"][:, part], out[:, part], reference["out"][:, part], dtype=torch.bfloat16, name="out"
        )
    precision.check_close(ours["final"], final, reference["final"], dtype=torch.bfloat16, name="final")


@each_torch_mode
def test_decoding_equals_the_full_pass(mode):
    case = TestGatedLinearAttention().make("channel", T=200, B=1, gate="near_one", state=False)
    check(case, "torch", mode, torch.bfloat16, cuts=list(range(1, 200)))


@each_torch_mode
def test_special_cases_are_one_another(mode):
    """No decay is a decay of 0; a head's decay is the same one in each of its channels; constant is the same at each step."""
    q, k, v = (torch.randn(2, 33, 2, 4, dtype=torch.float64) for _ in range(3))
    g = torch.tensor([-0.3, -2.0], dtype=torch.float64)

    def run(log_decay):
        return gated_linear_attention(q, k, v, log_decay, backend="torch", mode=mode)

    for one, two in [
        (run(None), run(torch.zeros(2, 33, 2, dtype=torch.float64))),
        (run(g), run(g.expand(2, 33, 2))),
        (run(g.expand(2, 33, 2)), run(g[:, None].expand(2, 33, 2, 4))),
    ]:
        for x, y in zip(one, two, strict=True):
            precision.check_close(x, y, None, dtype=torch.float64, name="special case")


# Tokens before the first sequence and behind the last one; empty sequences at both ends and inside; one token; none.
CUTS = [None, [0, 9, 21], [4, 4, 9, 9, 10, 18, 18], [3, 21], [0, 5], [6], [2, 2, 2]]


@pytest.mark.parametrize("cu", CUTS, ids=str)
@pytest.mark.parametrize("state", [False, True])
@each_mode
def test_backwards_in_time(backend, mode, state, cu):
    """The loop from the last token to the first, with every kind of decay; the final state is that at a sequence's start."""
    for variant in TestGatedLinearAttention.variants:
        words = variant if "reverse" in variant else f"{variant} reverse"
        case = TestGatedLinearAttention().make(words, T=21, B=2, cu=cu, state=state)
        result = check(case, backend, mode, chunk_size=4)
        for name, truth in case.oracle(case.inputs, None, numpy=True).items():
            precision.check_close(result[name], truth, None, dtype=torch.float64, name=f"{words} {name}")
        if cu:
            outside = [slice(0, cu[0]), slice(cu[-1], None)]
            timed = [n for n, x in case.inputs.items() if has_time(n, x)]
            for name in ("out", *(f"d_{n}" for n in timed)):
                assert all((result[name][:, part] == 0).all() for part in outside), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_mode
def test_backwards_in_other_dtypes(backend, mode, dtype):
    for variant in ("channel reverse", "head grouped reverse", "constant reverse"):
        for cu in (None, [4, 4, 19, 70, 70]):
            check(TestGatedLinearAttention().make(variant, T=75, cu=cu), backend, mode, dtype)


@each_mode
def test_a_closed_gate_hides_what_follows_it(backend, mode):
    """Backwards, -inf at t = 7 keeps the tokens behind it from all that come before."""
    log_decay = gates((1, 40, 1, 16), "mild", torch.Generator().manual_seed(0))
    log_decay[:, 7] = -torch.inf
    case = call_with(log_decay)
    case.options["reverse"] = True
    result = check(case, backend, mode)
    assert (result["d_log_decay"][:, 7] == 0).all()
    first = case.run({n: x[:, :8] for n, x in case.inputs.items()}, backend=backend, mode=mode)
    for name, value in {"out": result["out"][:, :8], "final": result["final"]}.items():
        precision.check_close(value, first[name], None, dtype=torch.float64, name=f"first half's {name}")


def test_a_reversed_pack_compiles_and_reads_no_boundaries():
    """In one graph, which nothing that waits for values would let through; other boundaries need no other graph."""
    torch._dynamo.reset()
    compiled = torch.compile(gated_linear_attention, fullgraph=True, backend="aot_eager")
    laws = TestGatedLinearAttention()
    for i, cu in enumerate(([4, 4, 13, 37], [0, 20, 20, 41])):
        case = laws.make("channel grouped reverse", T=41, cu=cu)
        call = {**case.options, "mode": "chunked"}
        with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
            check(case, "torch", "chunked", compiled=lambda x, call=call: named(*compiled(**x, **call)))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": (2, 3, 4)}, r"q.*\(2, 3, 4\)"),
        ({"k": (2, 3, 2, 5)}, r"\(2, 3, 2, 5\)"),
        ({"k": (2, 4, 2, 4)}, r"\(2, 4, 2, 4\)"),
        ({"v": (2, 3, 1, 5)}, r"\(2, 3, 1, 5\)"),
        ({"k": (2, 3, 3, 4), "v": (2, 3, 3, 5)}, r"H|heads"),
        ({"log_decay": (2, 3, 2, 5)}, r"log_decay.*\(2, 3, 2, 5\)"),
        ({"log_decay": (2, 3, 3)}, r"log_decay.*\(2, 3, 3\)"),
        ({"log_decay": (3,)}, r"log_decay.*\(3,\)"),
        ({"log_decay": (2, 4)}, r"log_decay.*\(2, 4\)"),
        ({"initial_state": (2, 2, 5, 4)}, r"initial_state.*\(2, 2, 5, 4\)"),
        ({"initial_state": (2, 2, 4)}, r"initial_state.*\(2, 2, 4\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_shapes(change, text, backend):
    arguments = {"q": torch.zeros(2, 3, 2, 4), "k": torch.zeros(2, 3, 2, 4), "v": torch.zeros(2, 3, 2, 5)}
    arguments.update({n: torch.zeros(shape) for n, shape in change.items()})
    with pytest.raises(ValueError, match=rf"gated_linear_attention: .*{text}"):
        gated_linear_attention(**arguments, backend=backend)


def test_wrong_dtypes():
    q, k, v = (torch.zeros(1, 3, 2, 4) for _ in range(3))
    with pytest.raises(TypeError, match=r"gated_linear_attention: .*v.*(float64|bfloat16)"):
        gated_linear_attention(q, k, v.to(torch.bfloat16))
    with pytest.raises(TypeError, match=r"gated_linear_attention: .*complex"):
        gated_linear_attention(q.to(torch.complex64), k, v)


@pytest.fixture
def triton_calls(monkeypatch):
    """What goes to Triton where there is a GPU, which a CPU computes here."""
    calls = []

    def forward(*call):
        calls.append(call)
        return eager.forward(*call)

    op = importlib.import_module("seqzoo_kernels.gated_linear_attention")
    monkeypatch.setitem(op.BACKENDS, "triton", SimpleNamespace(forward=forward, backward=eager.backward))
    # This op alone: the others of a mixer would take their Triton kernels too, which a CPU can't run.
    monkeypatch.setattr(op, "dispatch", SimpleNamespace(pick=dispatch.pick, no_triton=lambda q: None))
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hgrn2", {"conv_size": 4, "lower_bound": 0.5}),
        ("gla", {"num_heads": 4, "num_kv_heads": 2}),
        ("gla", {"feature_map": "elu", "normalize": True}),
        ("linear_attention", {}),
    ],
)
def test_auto_is_triton_for_what_mixers_call_on_a_gpu(name, options, dtype, triton_calls):
    """Plain, padded and packed calls and steps; half-precision products beside float32 gates and states."""
    mixer = seqzoo.create_mixer(name, 32, **options).to(dtype)
    x = torch.randn(2, 20, 32, dtype=dtype)
    y, state = mixer(x)
    y.sum().backward()
    mixer(x, state, mask=torch.rand(2, 20) > 0.3)
    mixer(x[:1], cu_seqlens=torch.tensor([0, 7, 7, 20]))
    mixer.step(x[:, 0], state)
    with torch.no_grad():
        mixer.step(x[:, 0], mixer.init_state(2, capacity=4), donate=True)
    assert [call[7] for call in triton_calls] == ["chunked"] * 3 + ["recurrent"] * 2
    overflows = name == "linear_attention" or "normalize" in options
    products = torch.float32 if dtype == torch.float16 and overflows else dtype
    for q, k, v, log_decay, initial_state, *_ in triton_calls:
        assert q.dtype == k.dtype == v.dtype == products
        assert initial_state.dtype == torch.float32
        assert log_decay is None or log_decay.dtype == torch.float32
    mixer(x, mode="parallel")  # is torch's
    assert len(triton_calls) == 5


@pytest.mark.parametrize(("T", "mode"), [(0, "chunked"), (1, "recurrent"), (2, "chunked")])
def test_a_reversed_call_goes_where_another_does(T, mode, triton_calls):
    """The same backend and mode, and nothing in the kernels that they would have to know of it."""
    case = TestGatedLinearAttention().make("channel grouped reverse", T=T)
    check(case, "auto", "auto")
    check(case, "triton", "auto", torch.float32)
    assert [call[7] for call in triton_calls] == [mode]


@pytest.mark.parametrize("name", ["hgrn2", "gla", "linear_attention"])
def test_triton_is_no_break_in_a_compiled_graph(name, triton_calls):
    mixer = seqzoo.create_mixer(name, 16)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 20, 16)
    y, _ = compiled(x)
    y.sum().backward()
    assert len(triton_calls) == 1
    assert torch.equal(y, mixer(x)[0])
