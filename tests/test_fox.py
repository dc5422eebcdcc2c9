"""attention with ALiBi, fox, fox_pro, transformer_pro: their formulas in numpy float64, and the invariants of forget gates."""

import numpy as np
import pytest
import torch
from formulas import D, T, close, count, made, same, seeds, set_to, sigmoid, some, weights
from hypothesis import given
from hypothesis import strategies as st

import seqzoo
from seqzoo_kernels import AttentionState, DecayAttentionState

NAMES = ["fox", "fox_pro", "transformer_pro"]


def rms(x, scale, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def turned(x, base, rotary_dim):
    """x [T, H, K] with its first rotary_dim features turned, pair by pair."""
    out, half = x.copy(), rotary_dim // 2
    for t in range(len(x)):
        for j in range(half):
            angle = t * base ** (-2 * j / rotary_dim)
            a, b = x[t, :, j], x[t, :, half + j]
            out[t, :, j] = a * np.cos(angle) - b * np.sin(angle)
            out[t, :, half + j] = a * np.sin(angle) + b * np.cos(angle)
    return out


def slopes(n):
    """ALiBi's rule as its authors tell it."""
    if n & (n - 1) == 0:
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]
    power = 2 ** int(np.log2(n))
    return [*slopes(power), *slopes(2 * power)[::2][: n - power]]


def numpy_attention(name, w, x, *, H, G, window=None, gate=None, base=None, rotary_dim=None):
    """y [T, D] from loops over heads, queries and keys; log f [T, H] is `gate`, or read from the weights."""
    d = w["query_proj.weight"].shape[0] // H

    def project(which, heads):
        u = x @ w[f"{which}_proj.weight"].T
        return (u + w.get(f"{which}_proj.bias", 0)).reshape(len(x), heads, -1)

    def shifted(which, u):
        if f"{which}_shift.proj.weight" not in w:
            return u
        a = sigmoid(x @ w[f"{which}_shift.proj.weight"].T)[..., None]
        before = np.concatenate([np.zeros_like(u[:1]), u[:-1]])
        return a * before + (1 - a) * u

    q, k, v = project("query", H), shifted("key", project("key", G)), shifted("value", project("value", G))
    if "query_norm.weight" in w:
        q = rms(q, w["query_norm.weight"].reshape(-1, d))
        k = rms(k, w["key_norm.weight"].reshape(-1, d))
    if base:
        q, k = (turned(u, base, rotary_dim or d) for u in (q, k))
    if gate is None:
        gate = np.zeros((len(x), H))
        if "forget.proj.weight" in w:
            gate = np.log(sigmoid(x @ w["forget.proj.weight"].T + w["forget.proj.bias"]))
        elif "forget.bias" in w:
            gate = gate + np.log(sigmoid(w["forget.bias"]))
    o = np.zeros((len(x), H, d))
    for h in range(H):
        g = h // (H // G)
        for i in range(len(x)):
            keys = range(max(0, i - window + 1) if window else 0, i + 1)
            e = np.exp([q[i, h] @ k[j, g] / np.sqrt(d) + gate[j + 1 : i + 1, h].sum() for j in keys])
            o[i, h] = (e / e.sum()) @ v[list(keys), g]
    if "norm.weight" in w:
        o = rms(o, w["norm.weight"].reshape(-1, d))
    o = o.reshape(len(x), -1)
    if "gate_proj.weight" in w:
        o = o * sigmoid(x @ w["gate_proj.weight"].T)
    return o @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def shaken(name, **options):
    """A mixer none of whose weights is 0 or 1."""
    mixer, x = made(name, **options)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return mixer, x


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention", {}),
        ("attention", {"rotary_dim": 2, "qk_norm": True, "num_kv_heads": 2}),
        ("attention", {"rope": False, "window": 3, "bias": True}),
        ("attention", {"rope": False, "alibi": True, "num_kv_heads": 2}),
        ("attention", {"alibi": True, "window": 3}),
        ("fox", {}),
        ("fox", {"num_kv_heads": 2, "window": 3, "bias": True}),
        ("fox", {"forget_gate": "bias_only", "qk_norm": True, "rope": True}),
        ("fox", {"forget_gate": "fixed", "decay_time_min": 1.0, "decay_time_max": 8.0}),
        ("fox", {"forget_gate": None}),
        ("fox_pro", {}),
        ("fox_pro", {"num_kv_heads": 1, "window": 4, "rope": True}),
        ("fox_pro", {"kv_shift": False, "output_norm": False}),
        ("fox_pro", {"qk_norm": False, "output_gate": False, "forget_gate": "bias_only"}),
        ("transformer_pro", {}),
        ("transformer_pro", {"rope": False, "num_kv_heads": 2}),
    ],
)
def test_formula(name, options):
    mixer, x = shaken(name, num_heads=4, **options)
    gate = None
    if options.get("alibi"):
        gate = np.tile(-np.array(slopes(4)), (T, 1))
    if options.get("forget_gate") == "fixed":
        gate = np.tile(-1 / np.array([1.0, 2.0, 4.0, 8.0]), (T, 1))
    rope = options.get("rope", name in ("attention", "transformer_pro"))
    y = [
        numpy_attention(
            name,
            weights(mixer),
            row,
            H=4,
            G=options.get("num_kv_heads", 4),
            window=options.get("window"),
            gate=gate,
            base=rope and (1e4 if name == "attention" else 5e5),
            rotary_dim=options.get("rotary_dim"),
        )
        for row in x.numpy()
    ]
    close(mixer, x, np.stack(y))


def copied(mixer, other):
    """`other` with the weights of `mixer`, as far as both have them."""
    own = dict(mixer.named_parameters())
    set_to(other, **{n.replace(".", "__"): own[n].detach() for n, _ in other.named_parameters() if n in own})
    return other


@pytest.mark.parametrize("window", [None, 3])
def test_fox_whose_gate_is_open_is_softmax_attention(window):
    mixer, x = made("fox", num_heads=4, window=window)
    set_to(mixer, forget__proj__weight=0.0, forget__proj__bias=60.0)
    same(mixer, copied(mixer, made("attention", num_heads=4, window=window, rope=False)[0]), x)
    same(mixer, copied(mixer, made("fox", num_heads=4, window=window, forget_gate=None)[0]), x)


def test_fox_pro_whose_gate_is_open_is_transformer_pro_without_positions():
    mixer, x = shaken("fox_pro", num_heads=2)
    set_to(mixer, forget__proj__weight=0.0, forget__proj__bias=60.0)
    same(mixer, copied(mixer, made("transformer_pro", num_heads=2, rope=False)[0]), x)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_fox_whose_gate_is_constant_is_alibi(heads):
    mixer, x = made("fox", num_heads=heads, forget_gate="bias_only")
    f = torch.tensor(slopes(heads), dtype=torch.float64).neg().exp()
    set_to(mixer, forget__bias=torch.logit(f))
    same(mixer, copied(mixer, made("attention", num_heads=heads, rope=False, alibi=True)[0]), x)


def test_alibi_has_the_published_slopes():
    for heads in range(1, 41):
        mixer = seqzoo.create_mixer("attention", 4 * max(heads, 4), num_heads=heads, head_dim=4, alibi=True)
        got = -mixer._log_decay(torch.zeros(1, 1, mixer.dim))
        np.testing.assert_allclose(got[0, 0].numpy(), slopes(heads), rtol=1e-6)
    assert slopes(8)[0] == 1 / 2
    assert slopes(8)[-1] == 1 / 256


@given(seed=seeds, t=st.integers(0, T - 1))
@some
def test_a_closed_gate_restarts_attention(seed, t):
    mixer, x = made("fox", seed=seed, num_heads=2)
    # one feature of x closes every gate
    weight = torch.zeros(2, D, dtype=torch.float64)
    weight[:, 0] = -1e4
    set_to(mixer, forget__proj__weight=weight, forget__proj__bias=1.0)
    x[..., 0] = 0.0
    x[:, t, 0] = 1.0
    torch.testing.assert_close(mixer(x)[0][:, t:], mixer(x[:, t:])[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["fox", "fox_pro"])
def test_the_first_gate_has_no_part(name):
    mixer, x = made(name, num_heads=2)
    logits = mixer.forget.proj
    y = mixer(x)[0]
    handle = logits.register_forward_hook(
        lambda _, __, z: torch.cat([torch.full_like(z[:, :1], -1e3), z[:, 1:]], 1)
    )
    torch.testing.assert_close(mixer(x)[0], y, rtol=1e-12, atol=1e-13)
    handle.remove()


@pytest.mark.parametrize("name", ["attention", *NAMES])
@pytest.mark.parametrize("window", [1, 4])
def test_a_window_in_training_is_the_one_of_steps(name, window):
    mixer = shaken(name, window=window, num_heads=2, **({"alibi": True} if name == "attention" else {}))[0]
    x = torch.randn(2, 3 * window, D, dtype=torch.float64)
    y, _ = mixer(x)
    for donate in (False, True):
        state, steps = mixer.init_state(2, capacity=window), []
        with torch.no_grad():
            for t in range(x.shape[1]):
                y_t, state = mixer.step(x[:, t], state, donate=donate)
                steps.append(y_t)
        torch.testing.assert_close(torch.stack(steps, 1), y, rtol=1e-11, atol=1e-12)
    cache = state if name in ("attention", "fox") else state.cache
    assert cache.k.shape[1] == window


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, cuts=st.lists(st.integers(0, T), min_size=1, max_size=3))
@some
def test_a_prefill_goes_on_from_a_cache_at_any_length(name, seed, cuts):
    """The shift takes its first vector from the cache, whether one token comes or many."""
    mixer, x = made(name, seed=seed, num_heads=2)
    y, last = mixer(x)
    state, parts, edges = None, [], [0, *sorted(cuts), T]
    for a, b in zip(edges, edges[1:], strict=False):
        part, state = mixer(x[:, a:b], state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, rtol=1e-11, atol=1e-12)
    if name != "fox":
        torch.testing.assert_close(state.key, last.key)
        torch.testing.assert_close(state.value, last.value)
        key = mixer.key_proj(x[:, -1:])
        torch.testing.assert_close(last.key, key)
        forgotten = state._replace(key=torch.zeros_like(state.key))
        assert not torch.equal(mixer(x, state)[0], mixer(x, forgotten)[0])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_lengths_go_on_as_if_alone(name):
    mixer, x = made(name, num_heads=2)
    mask = torch.arange(T) < torch.tensor([[4], [T]])
    _, state = mixer(x, mask=mask)
    more = torch.randn(2, 5, D, dtype=torch.float64)
    y, _ = mixer(more, state)
    for row, length in enumerate([4, T]):
        alone, _ = mixer(torch.cat([x[row : row + 1, :length], more[row : row + 1]], 1))
        torch.testing.assert_close(y[row], alone[0, length:], rtol=1e-11, atol=1e-12)


def test_gates_start_as_published():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("fox", 512)
    assert (mixer.forget.proj.bias == 0).all()
    assert mixer.forget.proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    f = mixer.forget(torch.randn(4, 64, 512)).exp()
    assert f.mean().item() == pytest.approx(0.5, abs=0.02)
    pro = seqzoo.create_mixer("fox_pro", 512)
    for shift in (pro.key_shift, pro.value_shift):
        assert shift.proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for kind in ("bias_only", "fixed"):
        times = {"decay_time_min": 2.0, "decay_time_max": 250.0}
        mixer = seqzoo.create_mixer("fox", 64, num_heads=4, forget_gate=kind, **times).double()
        log_f = mixer.forget(torch.zeros(1, 1, 64, dtype=torch.float64))[0, 0]
        np.testing.assert_allclose(-1 / log_f.detach().numpy(), [2, 10, 50, 250], rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "squares", "vectors"),
    [
        ("attention", {}, 4, 0),
        ("attention", {"num_kv_heads": 2}, 3, 0),
        ("fox", {}, 4, 4),
        ("fox_pro", {}, 5, 12),
        ("transformer_pro", {}, 5, 8),
    ],
)
def test_weights(name, options, squares, vectors):
    """As many matrices as the docstring says; beside them one bias a gate, and norms."""
    mixer = seqzoo.create_mixer(name, 64, num_heads=4, **options)
    matrices = sum(p.numel() for p in mixer.parameters() if p.dim() == 2)
    assert matrices == squares * 64**2 + vectors * 64
    assert count(mixer) - matrices == (4 if "fox" in name else 0) + (3 * 64 if "pro" in name else 0)


def test_states():
    plain, decayed = AttentionState, DecayAttentionState
    for name, options, kind in [
        ("attention", {}, plain),
        ("attention", {"alibi": True}, decayed),
        ("fox", {}, decayed),
        ("fox", {"forget_gate": None}, plain),
    ]:
        assert type(seqzoo.create_mixer(name, 64, **options).init_state(1)) is kind
    state = seqzoo.create_mixer("fox_pro", 64, num_heads=4, num_kv_heads=2).init_state(3, capacity=5)
    assert type(state.cache) is decayed
    assert state.cache.k.shape == (3, 5, 2, 16)
    assert state.key.shape == state.value.shape == (3, 1, 32)
    assert type(seqzoo.create_mixer("transformer_pro", 64).init_state(1).cache) is plain
    assert seqzoo.create_mixer("fox_pro", 64, kv_shift=False).init_state(1).key.shape[1] == 0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fox", {"head_dim": 5, "rope": True}, r"fox: .*even rotary_dim.*5"),
        ("fox_pro", {"head_dim": 5, "rope": True}, r"fox_pro: .*even rotary_dim.*5"),
        ("transformer_pro", {"head_dim": 5}, r"transformer_pro: .*even rotary_dim.*5"),
        ("attention", {"head_dim": 5}, r"attention: .*even rotary_dim.*5"),
        ("fox", {"forget_gate": "half"}, r"fox: .*forget_gate.*'full'.*'half'"),
        ("fox", {"decay_time_min": 9.0, "decay_time_max": 3.0}, r"fox: .*decay_time_min.*9\.0 and 3\.0"),
        ("fox_pro", {"num_heads": 4, "num_kv_heads": 3}, r"fox_pro: .*num_kv_heads.*4.*3"),
        ("fox", {"window": 0}, r"fox: .*window.*0"),
    ],
)
def test_wrong_options(name, options, text):
    with pytest.raises(ValueError, match=text):
        seqzoo.create_mixer(name, 64, **options)
