"""minGRU, minLSTM, linear attention and RG-LRU: their formulas in numpy float64, and the invariants that their papers state."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqzoo
from seqzoo import states
from seqzoo.mixers.linear_attention import features as features_of
from seqzoo_kernels.forget_gate import forget_gate

D, T = 32, 11
LOGITS = st.lists(st.floats(-1e4, 1e4), min_size=16, max_size=16)
SEEDS = st.integers(0, 2**16)


def made(name, *, dim=D, seed=0, **options):
    """A mixer in float64 with no parameter at 0, its parameters as arrays, and tokens."""
    torch.manual_seed(seed)
    mixer = seqzoo.create_mixer(name, dim, **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {name: p.detach().numpy() for name, p in mixer.named_parameters()}
    return mixer, weights, torch.randn(2, T, dim, dtype=torch.float64)


def count(mixer, matrices=True):
    return sum(p.numel() for p in mixer.parameters() if (p.dim() >= 2) == matrices)


def constant(linear, value):
    """Make a projection give `value` for every token."""
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(torch.as_tensor(value, dtype=torch.float64))


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def positive(x):
    return np.where(x >= 0, x + 0.5, sigmoid(x))


def log_positive(x):
    return np.where(x >= 0, np.log(np.maximum(x, 0) + 0.5), -softplus(-x))


def agree(got, wanted):
    np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-9, atol=1e-11)


# minGRU and minLSTM


def min_rnn_gates(name, weights, x, normalize=True):
    if name == "min_gru":
        z = sigmoid(linear(weights, "update_proj", x))
        return 1 - z, z
    f, i = (sigmoid(linear(weights, gate, x)) for gate in ("forget_proj", "input_proj"))
    return (f / (f + i), i / (f + i)) if normalize else (f, i)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("min_gru", {}),
        ("min_gru", {"candidate_act": None, "expand": 1.5}),
        ("min_lstm", {}),
        ("min_lstm", {"normalize": False, "forget_bias": 1.0}),
        ("min_lstm", {"bias": False, "out_proj": False, "candidate_act": None}),
    ],
)
def test_min_rnn(name, options):
    mixer, weights, x = made(name, **options)
    start = torch.randn(2, mixer.inner, dtype=torch.float64)  # of either sign
    h, out = start.numpy(), []
    for x_t in x.numpy().swapaxes(0, 1):
        decay, update = min_rnn_gates(name, weights, x_t, options.get("normalize", True))
        c = linear(weights, "candidate_proj", x_t)
        h = decay * h + update * (positive(c) if options.get("candidate_act", "positive") else c)
        out.append(linear(weights, "out_proj", h) if options.get("out_proj", True) else h)
    y, state = mixer(x, type(mixer.init_state(0))(start))
    agree(y, np.stack(out, 1))
    agree(state.h, h)


@pytest.mark.parametrize("name", ["min_gru", "min_lstm"])
@pytest.mark.parametrize("from_a_state", [False, True])
def test_min_rnn_is_the_scan_over_logarithms(name, from_a_state):
    mixer, weights, x = made(name, out_proj=False)
    if name == "min_gru":
        z = linear(weights, "update_proj", x.numpy())
        log_decay, log_update = -softplus(z), -softplus(-z)
    else:
        f, i = (linear(weights, gate, x.numpy()) for gate in ("forget_proj", "input_proj"))
        odds = softplus(-f) - softplus(-i)
        log_decay, log_update = -softplus(odds), -softplus(-odds)
    state = mixer.init_state(2)
    log_h = np.full((2, D), -np.inf)
    if from_a_state:
        state = mixer(torch.randn(2, 3, D, dtype=torch.float64))[1]
        log_h = np.log(state.h.detach().numpy())
    total = log_decay.cumsum(1)
    log_values = log_update + log_positive(linear(weights, "candidate_proj", x.numpy())) - total
    line = np.concatenate([log_h[:, None], log_values], 1)
    agree(mixer(x, state)[0], np.exp(total + np.logaddexp.accumulate(line, 1)[:, 1:]))


@given(LOGITS, LOGITS)
def test_min_lstm_gates_add_up_to_1_however_small_both_are(f, i):
    mixer, _, x = made("min_lstm", dim=16)
    constant(mixer.forget_proj, f)
    constant(mixer.input_proj, i)
    log_decay, update = mixer.gates(x[:1, :1])
    np.testing.assert_allclose((log_decay.exp() + update).detach().numpy(), 1, rtol=1e-15)
    odds = softplus(-np.array(f)) - softplus(-np.array(i))
    np.testing.assert_allclose(log_decay[0, 0].detach().numpy(), -softplus(odds), rtol=1e-11, atol=1e-300)
    np.testing.assert_allclose(
        update[0, 0].detach().numpy(), np.exp(-softplus(-odds)), rtol=1e-11, atol=1e-300
    )


@given(LOGITS)
def test_min_lstm_with_opposite_gates_is_min_gru(z):
    gru, lstm = (made(name, dim=16)[0] for name in ("min_gru", "min_lstm"))
    x = made("min_gru", dim=16)[2]
    for mixer in (gru, lstm):
        constant(mixer.candidate_proj, torch.linspace(-3, 3, 16))
    lstm.out_proj.load_state_dict(gru.out_proj.state_dict())
    constant(gru.update_proj, z)
    constant(lstm.input_proj, z)
    constant(lstm.forget_proj, [-value for value in z])
    torch.testing.assert_close(lstm(x)[0], gru(x)[0], rtol=1e-11, atol=1e-12)


@given(st.lists(st.floats(-80, 80), min_size=16, max_size=16))
def test_min_gru_gates_are_those_of_hgru_without_a_bound(z):
    mixer, _, x = made("min_gru", dim=16)
    constant(mixer.update_proj, z)
    log_decay, update = mixer.gates(x[:1, :1])
    log_f, input_weight = forget_gate(-torch.tensor(z, dtype=torch.float64), 0.0)
    torch.testing.assert_close(log_decay[0, 0], log_f, rtol=1e-12, atol=0)
    torch.testing.assert_close(update[0, 0], input_weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["min_gru", "min_lstm"])
@given(SEEDS, st.sampled_from([0.1, 1.0, 30.0]))
def test_min_rnn_state_is_a_mean_of_candidates(name, seed, scale):
    mixer, weights, x = made(name, seed=seed, out_proj=False)
    y, _ = mixer(scale * x, mixer(scale * x)[1])
    c = positive(linear(weights, "candidate_proj", scale * x.numpy()))
    assert (y > 0).all()
    assert (y.detach().numpy() <= c.max(1, keepdims=True) * (1 + 1e-12)).all()
    frozen = mixer.init_state(2)._replace(h=torch.full((2, D), -2.0, dtype=torch.float64))
    assert (mixer(scale * x, frozen)[0] >= -2).all()  # a state that no logarithm can hold


@pytest.mark.parametrize(("name", "matrices"), [("min_gru", 2), ("min_lstm", 3)])
def test_min_rnn_starts_near_a_half_with_the_weights_of_the_table(name, matrices):
    torch.manual_seed(0)
    for expand in (1.0, 1.5):
        mixer = seqzoo.create_mixer(name, 128, expand=expand)
        assert count(mixer) == (matrices + 1) * expand * 128**2
        assert count(mixer, matrices=False) == matrices * expand * 128 + 128
    assert count(seqzoo.create_mixer(name, 128, out_proj=False)) == matrices * 128**2
    assert count(seqzoo.create_mixer(name, 128, bias=False), matrices=False) == 0
    log_decay, _ = mixer.gates(torch.randn(4, 100, 128))
    assert log_decay.exp().mean().item() == pytest.approx(0.5, abs=0.02)


def test_min_lstm_forget_bias_is_added_at_the_start():
    plain, biased = (
        (torch.manual_seed(0), seqzoo.create_mixer("min_lstm", D, forget_bias=b))[1] for b in (0.0, 2.0)
    )
    torch.testing.assert_close(biased.forget_proj.bias, plain.forget_proj.bias + 2)
    torch.testing.assert_close(biased.input_proj.bias, plain.input_proj.bias)


# linear attention


def features(x, kind):
    if kind == "elu":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    return x if kind is None else np.maximum(x, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "bias": False},
        {"num_heads": 4, "expand_k": 0.5, "expand_v": 2.0, "norm": "rms"},
        {"num_heads": 2, "num_kv_heads": 1, "feature_map": None, "normalize": False, "norm": "rms"},
    ],
)
def test_linear_attention(options):
    mixer, weights, x = made("linear_attention", **options)
    H, G, kind = mixer.num_heads, mixer.num_kv_heads, options.get("feature_map", "elu")
    normalize = options.get("normalize", True)
    q, k, v = (linear(weights, f"{name}_proj", x.numpy()) for name in ("query", "key", "value"))
    q, k = (features(a.reshape(2, T, n, -1), kind) for a, n in ((q, H), (k, G)))
    v = v.reshape(2, T, G, -1)
    out = np.zeros((2, T, H, v.shape[-1]))
    for b in range(2):
        for h in range(H):
            g = h // (H // G)
            for i in range(T):
                w = np.array([q[b, i, h] @ k[b, j, g] for j in range(i + 1)])
                w = w / max(w.sum(), 1e-6) if normalize else w / np.sqrt(q.shape[-1])
                o = sum(w[j] * v[b, j, g] for j in range(i + 1))
                if options.get("norm"):
                    o = o / np.sqrt((o**2).mean() + 1e-5) * weights["norm.weight"]
                out[b, i, h] = o
    y, state = mixer(x)
    agree(y, linear(weights, "out_proj", out.reshape(2, T, -1)))
    agree(state.s, np.einsum("btgk,btgv->bgkv", k, v))
    agree(state.z, k.sum(1) if normalize else np.zeros((2, G, 0)))


def test_linear_attention_is_gla_without_decay():
    gla, _, x = made("gla", num_heads=4, num_kv_heads=2, expand_k=1.0)
    mixer, _, _ = made(
        "linear_attention",
        num_heads=4,
        num_kv_heads=2,
        feature_map=None,
        normalize=False,
        norm="rms",
        bias=False,
    )
    shared = {k: v for k, v in gla.state_dict().items() if not k.startswith(("decay", "gate"))}
    mixer.load_state_dict(shared)
    x[..., 0] = 1
    constant(gla.decay_proj[1], 1e5)  # log sigmoid of it is 0
    with torch.no_grad():
        gla.gate_proj.weight.zero_()
        gla.gate_proj.weight[:, 0] = 2.0
    y, state = gla(x)
    ours, own = mixer(x)
    torch.testing.assert_close(own.s, state.s)
    torch.testing.assert_close(ours * torch.nn.functional.silu(torch.tensor(2.0)), y)


@given(SEEDS, st.sampled_from([0.01, 1.0, 100.0]))
def test_linear_attention_of_ones_is_ones(seed, scale):
    mixer, _, x = made("linear_attention", seed=seed, num_heads=2)
    constant(mixer.value_proj, 1.0)
    constant(mixer.out_proj, 0.0)
    with torch.no_grad():
        mixer.out_proj.weight.copy_(torch.eye(D))
    torch.testing.assert_close(mixer(scale * x)[0], torch.ones_like(x), rtol=1e-12, atol=0)


@given(SEEDS, st.permutations(range(T - 1)))
def test_linear_attention_forgets_the_order_of_the_past(seed, order):
    mixer, _, x = made("linear_attention", seed=seed, num_heads=4, num_kv_heads=2)
    y, state = mixer(x)
    other, same = mixer(torch.cat([x[:, list(order)], x[:, -1:]], 1))
    torch.testing.assert_close(other[:, -1], y[:, -1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(same.s, state.s, rtol=1e-10, atol=1e-12)


def test_linear_attention_feature_stays_positive_where_elu_plus_1_cancels():
    u = torch.tensor([-80.0, -20.0, -1e-3, 0.0, 2.0])
    torch.testing.assert_close(features_of(u, "elu"), torch.where(u > 0, u + 1, u.exp()), rtol=1e-6, atol=0)
    assert (features_of(u, "elu") > 0).all()
    with torch.enable_grad():
        u.requires_grad_()
        (slope,) = torch.autograd.grad(features_of(u, "elu").sum(), u)
    torch.testing.assert_close(slope, torch.where(u > 0, torch.ones(5), u.exp()).detach(), rtol=1e-6, atol=0)


def test_linear_attention_in_float16_does_not_overflow():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("linear_attention", 16).half()
    constant(mixer.key_proj, 4.0)
    constant(mixer.query_proj, 4.0)
    y, state = mixer(torch.randn(1, 2048, 16, dtype=torch.float16))
    assert state.z.max() * 5 * 16 > torch.finfo(torch.float16).max
    assert y.isfinite().all()


def test_linear_attention_has_the_weights_of_its_docstring():
    for options, matrices in (({}, 4), ({"num_heads": 4, "num_kv_heads": 1}, 2.5), ({"expand_k": 0.5}, 3)):
        assert count(seqzoo.create_mixer("linear_attention", 64, **options)) == matrices * 64**2
    for dim, heads in ((16, 1), (64, 1), (100, 2), (512, 8)):
        assert seqzoo.create_mixer("linear_attention", dim).num_heads == heads
    mixer = seqzoo.create_mixer("linear_attention", 64, num_heads=4, num_kv_heads=2)
    assert mixer.state_size(1) == 4 * 2 * 16 * (16 + 1)


# RG-LRU


def block_linear(weights, name, x):
    weight = weights[f"{name}.weight"]
    parts = np.split(x, weight.shape[0], -1)
    return (
        np.concatenate([part @ block for part, block in zip(parts, weight, strict=True)], -1)
        + weights[f"{name}.bias"]
    )


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_heads": 4, "expand": 1.5}, {"conv_size": 0, "scale_first": True}, {"decay_init": "paper"}],
)
@pytest.mark.parametrize("seen", [0, 5])
def test_rg_lru(options, seen):
    mixer, weights, x = made("rg_lru", **options)
    line = linear(weights, "in_proj", x.numpy())
    if mixer.conv is not None:
        padded = np.concatenate([np.zeros((2, 3, mixer.inner)), line], 1)
        taps = weights["conv.weight"]
        line = sum(padded[:, tap : tap + T] * taps[:, tap] for tap in range(4)) + weights["conv_bias"]
    h, out = np.zeros((2, mixer.inner)), []
    for t in range(T):
        u = line[:, t]
        i, r = (sigmoid(block_linear(weights, f"{name}_gate", u)) for name in ("input", "recurrence"))
        a = np.exp(-8 * r * softplus(weights["decay"]))
        m = 1 if t == 0 and not options.get("scale_first") else np.sqrt(1 - a**2)
        h = a * h + m * i * u
        y = gelu_tanh(linear(weights, "gate_proj", x[:, t].numpy()))
        out.append(linear(weights, "out_proj", h * y))
    _, state = mixer(x[:, :seen])
    y, state = mixer(x[:, seen:], state)
    agree(y, np.stack(out, 1)[:, seen:])
    agree(state.h, h)
    assert state.length.tolist() == [T, T]


def test_rg_lru_first_token_is_the_first_of_each_sequence_of_a_pack():
    mixer, _, x = made("rg_lru")
    _, states_ = mixer(x[:, :3])
    fresh = mixer.init_state(2)
    cu = torch.tensor([0, 4, 4, 9, 11])  # new, new and empty, going on, new
    given_states = type(fresh)(*(torch.cat([f, s[:1], f[:1]]) for f, s in zip(fresh, states_, strict=True)))
    y, state = mixer(x[:1], given_states, cu_seqlens=cu)
    assert state.length.tolist() == [4, 0, 8, 2]
    for n, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        alone, _ = mixer(x[:1, start:end], states.select(given_states, torch.tensor([n])))
        torch.testing.assert_close(y[:, start:end], alone)
    assert not torch.allclose(y[:, 4:9], mixer(x[:1, 4:9])[0])


@given(st.floats(-30, 10), st.integers(1, 60))
def test_rg_lru_keeps_the_variance_of_white_input(gate, length):
    """a^{2 t} + (1 - a^2) sum_s a^{2 s} = 1 at every t, because the first token is not scaled."""
    mixer, _, _ = made("rg_lru", dim=16, conv_size=0)
    constant(mixer.recurrence_gate, gate)
    constant(mixer.input_gate, 1e3)  # open
    constant(mixer.in_proj, 0.0)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(torch.eye(16))
    impulses = torch.eye(length, dtype=torch.float64)[..., None].expand(-1, -1, 16)
    _, state = mixer(impulses)
    torch.testing.assert_close(
        state.h.square().sum(0), torch.ones(16, dtype=torch.float64), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rg_lru_with_a_shut_gate_keeps_its_state_and_has_finite_gradients(dtype):
    mixer, _, x = made("rg_lru")
    mixer, x = mixer.to(dtype), x.to(dtype)
    state = states.detach(mixer(x)[1])
    constant(mixer.recurrence_gate, -1e3)  # r = 0: a = 1, and the root has no derivative
    y, after = mixer(x, state)
    torch.testing.assert_close(after.h, state.h)
    gradients = torch.autograd.grad(y.sum() + after.h.sum(), list(mixer.parameters()))
    assert all(g.isfinite().all() for g in gradients)


@given(st.floats(-60, -10))
def test_rg_lru_gradient_of_a_nearly_shut_gate_is_exact(gate):
    """sqrt(1 - a^2) is about sqrt(16 softplus(Lambda) e^gate): its slope in the gate is half of itself."""
    mixer, _, x = made("rg_lru", dim=16, conv_size=0, scale_first=True)
    constant(mixer.recurrence_gate, gate)
    _, state = mixer(x[:1, :1])
    (slope,) = torch.autograd.grad(state.h.sum(), mixer.recurrence_gate.bias)
    torch.testing.assert_close(slope, state.h[0] / 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("decay_init", ["code", "paper"])
def test_rg_lru_starts_as_documented(decay_init):
    torch.manual_seed(0)
    width = 4096
    mixer = seqzoo.create_mixer("rg_lru", 64, expand=width / 64, num_heads=32, decay_init=decay_init)
    radius = torch.exp(-torch.nn.functional.softplus(mixer.decay.double()))
    spread, low, high = (radius**2, 0.9**2, 0.999**2) if decay_init == "code" else (radius**8, 0.9, 0.999)
    assert low - 1e-6 <= spread.min()
    assert spread.max() <= high + 1e-6
    assert spread.mean().item() == pytest.approx((low + high) / 2, abs=0.01 * (high - low) * 3)
    assert spread.std().item() == pytest.approx((high - low) / 12**0.5, rel=0.05)
    if decay_init == "code":
        half = radius**4  # a at r = 1/2
        assert half.min().item() == pytest.approx(0.656, abs=2e-3)
        assert half.max().item() == pytest.approx(0.996, abs=2e-3)
    deviations = {
        "in_proj.weight": 64**-0.5,
        "gate_proj.weight": 64**-0.5,
        "out_proj.weight": width**-0.5,
        "conv.weight": (0.01 / 4) ** 0.5,
        "input_gate.weight": (32 / width) ** 0.5,
        "recurrence_gate.weight": (32 / width) ** 0.5,
    }
    for name, parameter in mixer.named_parameters():
        if name in deviations:
            assert parameter.std().item() == pytest.approx(deviations[name], rel=0.03)
        elif name != "decay":
            assert not parameter.any()


def test_rg_lru_has_the_weights_of_its_docstring_and_none_of_its_vectors_decays():
    mixer = seqzoo.create_mixer("rg_lru", 64, expand=1.5, num_heads=4)
    inner = 96
    assert count(mixer) == 3 * 64 * inner + 2 * inner**2 // 4 + 4 * inner
    assert count(mixer, matrices=False) == 2 * inner + 64 + 4 * inner  # biases, and Lambda
    assert mixer.state_size(1) == 4 * 4 * inner + 8
    decayed = {name for name, p in mixer.named_parameters() if mixer.param_rule(name, p).decay}
    assert "decay" not in decayed
    assert not any("bias" in name for name in decayed)
    assert seqzoo.create_mixer("rg_lru", 640).num_heads == 4  # blocks of 160


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("min_gru", {"candidate_act": "tanh"}, r"candidate_act.*'positive', None.*'tanh'"),
        ("min_gru", {"expand": 0.0}, r"expand.*0\.0"),
        ("min_gru", {"expand": 2.0, "out_proj": False}, r"min_gru.*out_proj.*expand = 2\.0"),
        ("min_lstm", {"forget_bias": 1.0, "bias": False}, r"bias with forget_bias = 1\.0"),
        ("linear_attention", {"feature_map": "softmax"}, r"feature_map.*'elu', 'relu', None.*'softmax'"),
        ("linear_attention", {"feature_map": None}, r"feature_map.*normalize.*None"),
        ("linear_attention", {"num_heads": 5}, r"num_heads.*32.*5"),
        ("linear_attention", {"num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads.*4.*3"),
        ("linear_attention", {"norm": "group"}, r"norm.*'rms'.*'group'"),
        ("linear_attention", {"normalizer_eps": 0.0}, r"normalizer_eps.*0\.0"),
        ("rg_lru", {"decay_init": "uniform"}, r"decay_init.*'code', 'paper'.*'uniform'"),
        ("rg_lru", {"num_heads": 3}, r"num_heads.*32.*3"),
        ("rg_lru", {"conv_size": -1}, r"conv_size.*-1"),
    ],
)
def test_a_wrong_option_is_an_error(name, options, words):
    with pytest.raises(ValueError, match=words):
        seqzoo.create_mixer(name, D, **options)
