"""attention: the laws of an op, and what is its own: windows, caches, grouped heads."""

import pytest
import torch
from op_cases import Case, check, gates
from op_laws import OpLaws, each_mode, each_torch_mode

from seqzoo_kernels import AttentionState, DecayAttentionState, attention, precision

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestAttention(OpLaws):
    """Past tokens come in rows of different lengths, with dead slots behind them; a window's cache has gone round."""

    op = "attention"
    variants = ["decay", "plain", "decay window=4", "window=4", "decay grouped window=20", "grouped scaled"]

    def make(self, variant, *, T, B=2, size=3, seed=0, gate="extreme", state=True, cu=None):
        generator = torch.Generator().manual_seed(seed)
        words = variant.split()
        N, B = (len(cu) - 1, 1) if cu else (B, B)
        K, V = size, size + 2
        G, H = (2, 4) if "grouped" in words else (1, 1) if size > 12 else (2, 2)
        window = next((int(w.removeprefix("window=")) for w in words if w.startswith("window=")), None)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inputs = {"q": normal(B, T, H, K), "k": normal(B, T, G, K), "v": normal(B, T, G, V)}
        if "decay" in words:
            inputs["log_decay"] = gates((B, T, H), gate, generator)
        options = {"scale": 0.7} if "scaled" in words else {}
        if window:
            options["window"] = window
        if cu:
            options["cu_seqlens"] = torch.tensor(cu)
            for x in inputs.values():
                x[:, cu[-1] :] = torch.nan
        lengths = None
        if state:
            S = 4 if window == 4 else 7
            lengths = torch.tensor(
                [([3, 9, 0, 4, 14] if window == 4 else [4, 7, 0, 2, 5])[n % 5] for n in range(N)],
                dtype=torch.int64,
            )
            past = {"past_k": normal(N, S, G, K), "past_v": normal(N, S, G, V)}
            if "decay" in words:
                past["past_bias"] = gates((N, S, H), gate, generator)
            dead = torch.arange(S) >= lengths[:, None]  # a window's cache is full once its length passes it
            for n, x in past.items():
                inputs[n] = torch.where(dead.reshape(N, S, *(1,) * (x.dim() - 2)), 0.0, x)
        return Case(self.op, inputs, options, lengths)


def qkv(*lead, T, H=2, G=2, K=4, V=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*lead, T, H, K), (*lead, T, G, K), (*lead, T, G, V)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@each_mode
def test_a_window_keeps_the_last_tokens(backend, mode):
    """Window 4, append 6 then 3: the last 4 tokens, each in slot position % 4."""
    q, k, v = qkv(1, T=9)
    options = {"window": 4, "backend": backend, "mode": mode}
    out1, state = attention(q[:, :6], k[:, :6], v[:, :6], **options)
    out2, state = attention(q[:, 6:], k[:, 6:], v[:, 6:], initial_state=state, **options)
    assert type(state) is AttentionState
    assert state.length.tolist() == [9]
    for p in (5, 6, 7, 8):
        assert torch.equal(state.k[:, p % 4], k[:, p])
        assert torch.equal(state.v[:, p % 4], v[:, p])
    full, _ = attention(q, k, v, **options)
    precision.check_close(torch.cat([out1, out2], 1), full, None, dtype=torch.float64, name="out")


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17])
@each_torch_mode
def test_a_window_reaches_every_mode(mode, window):
    T = 3 * window
    q, k, v = qkv(2, T=T)
    inputs = {"q": q, "k": k, "v": v, "log_decay": gates((2, T, 2), "mild", torch.Generator().manual_seed(0))}
    for given in (inputs, {n: inputs[n] for n in ("q", "k", "v")}):
        case = Case("attention", given, {"window": window})
        check(case, "torch", mode)
        check(case, "torch", mode, cuts=list(range(1, T)))
        check(case, "torch", mode, cuts=[T // 2])
        unlimited = Case("attention", given, {}).run(given, backend="torch", mode=mode)
        assert window >= T or not torch.equal(
            unlimited["out"], case.run(given, backend="torch", mode=mode)["out"]
        )


@each_torch_mode
def test_a_window_beyond_the_sequence_is_none(mode):
    q, k, v = qkv(2, T=20)
    one, _ = attention(q, k, v, window=20, backend="torch", mode=mode)
    two, _ = attention(q, k, v, backend="torch", mode=mode)
    precision.check_close(one, two, None, dtype=torch.float64, name="out")


@each_mode
def test_spare_slots_change_nothing(backend, mode):
    """A cache with dead slots gives what one without gives, and the new tokens stand right behind the old ones."""
    q, k, v = qkv(2, T=12)
    g = gates((2, 12, 2), "mild", torch.Generator().manual_seed(0))
    options = {"backend": backend, "mode": mode}
    _, tight = attention(q[:, :5], k[:, :5], v[:, :5], g[:, :5], **options)
    pads = [torch.cat([x, torch.zeros_like(x[:, :3])], 1) for x in (tight.k, tight.v, tight.bias)]
    spare = DecayAttentionState(pads[0], pads[1], tight.length, pads[2])
    rest = (q[:, 5:], k[:, 5:], v[:, 5:], g[:, 5:])
    out, state = attention(*rest, initial_state=tight, **options)
    out2, state2 = attention(*rest, initial_state=spare, **options)
    precision.check_close(out, out2, None, dtype=torch.float64, name="out")
    assert state.k.shape[1] == 12
    assert state2.k.shape[1] == 15
    for name in ("k", "v", "bias"):
        one, two = getattr(state, name), getattr(state2, name)
        precision.check_close(two[:, :12], one, None, dtype=torch.float64, name=name)
        assert (two[:, 12:] == 0).all()


@pytest.mark.parametrize("window", [None, 5])
def test_a_cache_keeps_its_dtype(window):
    """An empty one too: a model's, in the dtype of its weights, under autocast."""
    q, k, v = qkv(2, T=9, dtype=torch.bfloat16)
    empty = [x[:, :0].float() for x in (k, v)]
    _, state = attention(q, k, v, window=window, initial_state=AttentionState(*empty, torch.zeros(2).long()))
    for x, given in ((state.k, k), (state.v, v)):
        assert x.dtype == torch.float32
        for p in range(9 - (window or 9), 9):
            assert torch.equal(x[:, p % (window or 9)], given[:, p].float())


def test_a_cache_without_a_copy():
    """Is k and v themselves where they are dense, and the same cache where they are not."""
    q, k, v = qkv(2, T=8)
    _, copied = attention(q, k, v)
    _, shared = attention(q, k, v, copy=False)
    assert copied.k.data_ptr() != k.data_ptr()
    assert (shared.k.data_ptr(), shared.v.data_ptr()) == (k.data_ptr(), v.data_ptr())
    _, strided = attention(q, k.mT.contiguous().mT, v.mT.contiguous().mT, copy=False)
    for one in (shared, strided):
        assert one.k.is_contiguous() and one.v.is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(one, copied, strict=True))
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="capacity"):
        attention(q[:, :1], k[:, :1], v[:, :1], initial_state=shared, donate=True)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("decay", [False, True])
def test_a_donated_cache_is_written_in_place(decay, window):
    """donate=True consumes the state: the same memory, the same results; without it the state stays as it was."""
    T = 8
    q, k, v = qkv(2, T=T)
    g = gates((2, T, 2), "mild", torch.Generator().manual_seed(0)) if decay else None
    S = window or T
    empty = [torch.zeros(2, S, 2, 4, dtype=q.dtype), torch.zeros(2, S, 2, 3, dtype=q.dtype)]
    length = torch.zeros(2, dtype=torch.int64)
    state = AttentionState(*empty, length)
    if decay:
        state = DecayAttentionState(*empty, length, torch.zeros(2, S, 2, dtype=q.dtype))
    addresses = [state.k.data_ptr(), state.v.data_ptr()]
    full, last = attention(q, k, v, g, window=window)
    outs = []
    with torch.no_grad():
        for t in range(T):
            one = slice(t, t + 1)
            step = (q[:, one], k[:, one], v[:, one], g[:, one] if decay else None)
            out, state = attention(*step, initial_state=state, window=window, donate=True)
            outs.append(out)
            assert [state.k.data_ptr(), state.v.data_ptr()] == addresses
    precision.check_close(torch.cat(outs, 1), full, None, dtype=torch.float64, name="out")
    for name in state._fields:
        assert torch.equal(getattr(state, name), getattr(last, name)) or name == "bias"
    if decay:
        precision.check_close(state.bias, last.bias, None, dtype=torch.float64, name="bias")
    if window is None:
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="capacity"):
            attention(
                q[:, :1], k[:, :1], v[:, :1], g[:, :1] if decay else None, initial_state=state, donate=True
            )


@each_mode
def test_rows_of_a_state_can_be_reordered(backend, mode):
    case = TestAttention().make("decay", T=9, B=3)
    order = torch.tensor([2, 0, 0, 1])
    out, state = case.call(case.inputs, case.initial_state(case.inputs), backend=backend, mode=mode)
    inputs = {n: x[order] for n, x in case.inputs.items()}
    moved = type(state)(*(x[order] for x in case.initial_state(case.inputs)))
    out2, state2 = case.call(inputs, moved, backend=backend, mode=mode)
    precision.check_close(out2, out[order], None, dtype=torch.float64, name="out")
    for x, y, name in zip(state2, state, state._fields, strict=True):
        precision.check_close(x, y[order], None, dtype=torch.float64, name=name)


@pytest.mark.parametrize("size", [-torch.inf, -1e9, -1e6, -1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_mode
def test_one_strong_gate(backend, mode, size, dtype):
    """-inf forgets everything before it, exactly; the gates after a large one still count."""
    q, k, v = qkv(1, T=40)
    g = gates((1, 40, 2), "mild", torch.Generator().manual_seed(0))
    g[:, 7] = size
    case = Case("attention", {"q": q, "k": k, "v": v, "log_decay": g}, {})
    result = check(case, backend, mode, dtype)
    assert all(torch.isfinite(x).all() for n, x in result.items() if n != "final.bias")
    second = Case("attention", {n: x[:, 7:] for n, x in case.inputs.items()}, {})
    inputs = second.cast(dtype)
    alone = second.run(inputs, backend=backend, mode=mode)["out"]
    precision.check_close(result["out"][:, 7:], alone.double(), alone, dtype=dtype, name="second half")


@each_torch_mode
def test_the_first_gate_has_no_effect(mode):
    q, k, v = qkv(1, T=10)
    g = gates((1, 10, 2), "mild", torch.Generator().manual_seed(0))
    one, state = attention(q, k, v, g, backend="torch", mode=mode)
    g[:, 0] = -torch.inf
    two, state2 = attention(q, k, v, g, backend="torch", mode=mode)
    precision.check_close(one, two, None, dtype=torch.float64, name="out")
    precision.check_close(state.bias, state2.bias, None, dtype=torch.float64, name="bias")


@each_torch_mode
def test_constant_gates_are_linear_biases(mode):
    """ALiBi: a constant log-decay is a bias proportional to the distance."""
    q, k, v = qkv(1, T=30)
    slope = torch.tensor([-0.5, -0.0625], dtype=torch.float64)
    out, _ = attention(q, k, v, slope.expand(1, 30, 2), backend="torch", mode=mode)
    distance = torch.arange(30)[:, None] - torch.arange(30)
    scores = torch.einsum("bihk,bjhk->bhij", q, k) / 2 + slope[:, None, None] * distance
    weights = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1)
    precision.check_close(
        out, torch.einsum("bhij,bjhv->bihv", weights, v), None, dtype=torch.float64, name="out"
    )


@each_torch_mode
def test_large_scores_do_not_overflow(mode):
    q, k, v = qkv(1, T=33)
    check(Case("attention", {"q": 1e3 * q, "k": 1e3 * k, "v": v}, {}), "torch", mode)


@each_torch_mode
def test_biases_far_along_a_sequence_stay_exact(mode):
    """Differences of a cumulative sum lose the small gates behind many large ones."""
    T = 300
    q, k, v = qkv(1, T=T)
    g = torch.full((1, T, 2), -50.0, dtype=torch.float64)
    g[:, 150:] = -1e-3
    check(Case("attention", {"q": q, "k": k, "v": v, "log_decay": g}, {}), "torch", mode, torch.float32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": (2, 3, 4)}, r"q.*\(2, 3, 4\)"),
        ({"k": (2, 3, 2, 5)}, r"\(2, 3, 2, 5\)"),
        ({"v": (2, 3, 1, 5)}, r"\(2, 3, 1, 5\)"),
        ({"k": (2, 3, 3, 4), "v": (2, 3, 3, 5)}, r"H|heads"),
        ({"log_decay": (2, 3, 3)}, r"log_decay.*\(2, 3, 3\)"),
        ({"log_decay": (2,)}, r"log_decay.*\(2,\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_wrong_shapes(change, text, backend):
    arguments = {"q": torch.zeros(2, 3, 2, 4), "k": torch.zeros(2, 3, 2, 4), "v": torch.zeros(2, 3, 2, 5)}
    arguments.update({n: torch.zeros(shape) for n, shape in change.items()})
    with pytest.raises(ValueError, match=rf"attention: .*{text}"):
        attention(**arguments, backend=backend)


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_wrong_windows(window):
    q, k, v = qkv(1, T=3)
    with pytest.raises((ValueError, TypeError), match=rf"attention: .*window.*{window}"):
        attention(q, k, v, window=window)


def test_wrong_states():
    q, k, v = qkv(2, T=3)
    g = torch.zeros(2, 3, 2, dtype=q.dtype)
    _, plain = attention(q, k, v)
    _, decayed = attention(q, k, v, g)
    with pytest.raises((ValueError, TypeError), match=r"attention: .*initial_state"):
        attention(q, k, v, g, initial_state=plain)
    with pytest.raises((ValueError, TypeError), match=r"attention: .*initial_state"):
        attention(q, k, v, initial_state=decayed)
    with pytest.raises((ValueError, TypeError), match=r"attention: .*initial_state"):
        attention(q, k, v, initial_state=plain.k)
    with pytest.raises((ValueError, TypeError), match=r"attention: .*initial_state"):
        attention(q, k, v, initial_state=plain._replace(v=plain.v[:, :2]))
    with pytest.raises((ValueError, TypeError), match=r"attention: .*donate"):
        attention(q, k, v, donate=True)


@pytest.mark.parametrize("logits", [1.0, 30.0, 300.0])
@pytest.mark.parametrize(
    ("backend", "mode"), [("sdpa", "auto"), *(("torch", m) for m in ("parallel", "chunked", "recurrent"))]
)
def test_gradients_of_a_saturated_softmax(backend, mode, logits):
    """Scores far above 1: rounding one of size s moves its weight by a share s eps, so a sum's terms count s times.

    Where nearly all weight is on one key, d q and d k are small differences of such terms.
    """
    for seed in range(10):
        q, k, v = qkv(2, T=33, H=4, G=2, K=8, V=8, seed=seed, dtype=torch.float32)
        q = q * logits
        w = qkv(2, T=33, H=4, V=8, G=4, seed=seed + 100, dtype=torch.float32)[2]

        def gradients(q, k, v, w=w, **options):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out, _ = attention(*leaves, **options)
            return dict(zip(("d_q", "d_k", "d_v"), torch.autograd.grad(out, leaves, w.to(out)), strict=True))

        ours = gradients(q, k, v, backend=backend, mode=mode)
        exact = gradients(q.double(), k.double(), v.double(), backend="reference")
        reference = gradients(q, k, v, backend="reference")
        scales = softmax_scales(q.double(), k.double(), v.double(), w.double())
        for name, wanted in exact.items():
            scale = max(precision.largest(wanted), scales[name])
            precision.check_close(
                ours[name], wanted, reference[name], dtype=torch.float32, name=name, scale=scale
            )


def softmax_scales(q, k, v, w):
    """The largest sums of terms, each |s| times, of a whole causal pass: P |dP| |k|, P |dP| |q| and P |w|."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    q = q * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    P = scores.masked_fill(later, -torch.inf).softmax(-1)
    size = scores.abs().clamp(min=1)
    terms = P * torch.einsum("bihv,bjhv->bhij", w, v).abs()
    terms = (terms + P * terms.sum(-1, keepdim=True)) * size
    d_q = torch.einsum("bhij,bjhk->bihk", terms, k.abs()) * q.shape[-1] ** -0.5
    d_k = torch.einsum("bhij,bihk->bjhk", terms, q.abs())
    d_v = torch.einsum("bhij,bihv->bjhv", P * size, w.abs())
    d_k, d_v = (x.unflatten(2, (-1, groups)).sum(3) for x in (d_k, d_v))
    return {"d_q": d_q.max().item(), "d_k": d_k.max().item(), "d_v": d_v.max().item()}
