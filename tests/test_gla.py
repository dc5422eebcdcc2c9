"""Gated linear attention with each of its options: its formula in a numpy loop, and what is known of it."""

import numpy as np
import pytest
import torch
from formulas import D, close, linear, made, same, seeds, set_to, sigmoid, silu, some, weights
from hypothesis import given
from hypothesis import strategies as st

import seqzoo
from seqzoo.layers import norm_and_gate

OPTIONS = {
    "defaults": {},
    "shared heads": {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "expand_v": 2.0},
    "gate": {"gate_rank": 3, "gate_normalizer": 2.0, "log_decay_min": -0.3},
    "features": {"feature_map": "relu", "log_decay_min": 0.0},
    "normaliser": {"num_heads": 2, "feature_map": "elu", "normalize": True, "normalizer_eps": 1e-3},
    "convolution": {
        "num_heads": 4,
        "num_kv_heads": 1,
        "conv_size": 4,
        "feature_map": "elu",
        "normalize": True,
    },
}


def numpy_gla(mixer, options, x):
    """y [T, D], S and z of one sequence, head by head."""
    w, H, G, K, V = weights(mixer), mixer.num_heads, mixer.num_kv_heads, mixer.head_k, mixer.head_v
    phi = {
        "elu": lambda u: np.where(u > 0, u + 1, np.exp(np.minimum(u, 0))),
        "relu": lambda u: np.maximum(u, 0),
        None: lambda u: u,
    }[options.get("feature_map")]
    taps, line = options.get("conv_size", 0), []
    S, z, y = np.zeros((G, K, V)), np.zeros((G, K)), []
    for x_t in x:
        u = np.concatenate([linear(w, f"{name}_proj", x_t) for name in ("query", "key", "value")])
        if taps:
            line = [*line, u][-taps:]
            weight = w["conv.weight"].T[taps - len(line) :]
            u = silu(sum(tap * past for tap, past in zip(weight, line, strict=True)))
        q, k = phi(u[: H * K].reshape(H, K)), phi(u[H * K : H * K + G * K].reshape(G, K))
        v = u[H * K + G * K :].reshape(G, V)
        gate = w["decay_proj.1.weight"] @ (w["decay_proj.0.weight"] @ x_t) + w["decay_proj.1.bias"]
        a = sigmoid(gate) ** (1 / options.get("gate_normalizer", 16))
        if "log_decay_min" in options:
            a = np.maximum(a, np.exp(options["log_decay_min"]))
        a = a.reshape(G, K)
        S, z = a[..., None] * S + k[..., None] * v[:, None], a * z + k
        out = np.zeros((H, V))
        for h in range(H):
            g = h // (H // G)
            o = q[h] @ S[g]
            if options.get("normalize"):
                o = o / max(q[h] @ z[g], options.get("normalizer_eps", 1e-6))
            else:
                o = o / np.sqrt(K)
            out[h] = o / np.sqrt((o**2).mean() + 1e-5) * w["norm.weight"]
        y.append(linear(w, "out_proj", out.reshape(-1) * silu(linear(w, "gate_proj", x_t))))
    return np.stack(y), S, z


@pytest.mark.parametrize("case", OPTIONS)
def test_formula(case):
    mixer, x = made("gla", **OPTIONS[case])
    y, S, z = (
        np.stack(part)
        for part in zip(*(numpy_gla(mixer, OPTIONS[case], row) for row in x.numpy()), strict=True)
    )
    close(mixer, x, y)
    _, state = mixer(x)
    np.testing.assert_allclose(state.s.detach().numpy(), S, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        state.z.detach().numpy(), z if OPTIONS[case].get("normalize") else z[..., :0], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_without_decay_it_is_linear_attention(normalize):
    mixer, x = made("gla", num_heads=4, num_kv_heads=2, expand_k=1.0, feature_map="elu", normalize=normalize)
    other, _ = made(
        "linear_attention", num_heads=4, num_kv_heads=2, normalize=normalize, norm="rms", bias=False
    )
    other.load_state_dict(
        {k: v for k, v in mixer.state_dict().items() if not k.startswith(("decay", "gate"))}
    )
    x[..., 0] = 1
    set_to(mixer, decay_proj__1__weight=0.0, decay_proj__1__bias=1e5, gate_proj__weight=0.0)
    with torch.no_grad():
        mixer.gate_proj.weight[:, 0] = 40.0  # silu of it is 40
    (y, state), (wanted, its) = mixer(x), other(x)
    torch.testing.assert_close(y, 40 * wanted)
    torch.testing.assert_close(state.s, its.s)
    torch.testing.assert_close(state.z, its.z)


@some
@given(seed=seeds, size=st.floats(0.01, 100))
def test_values_of_1_are_read_as_1_whatever_the_decay(seed, size):
    mixer, x = made("gla", seed=seed, feature_map="elu", normalize=True, normalizer_eps=1e-300)
    heads = []

    def seen(norm, o, *gate, **options):
        heads.append(o)
        return norm_and_gate(norm, o, *gate, **options)

    x[..., 0] = 1
    set_to(mixer, value_proj__weight=0.0)
    with torch.no_grad():
        mixer.value_proj.weight[:, 0] = 1.0
        for name in ("query", "key", "decay"):
            first = mixer.decay_proj[0] if name == "decay" else mixer.get_submodule(f"{name}_proj")
            first.weight.mul_(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqzoo.mixers.gla.norm_and_gate", seen)
        mixer(x)
    torch.testing.assert_close(heads[0], torch.ones_like(heads[0]), rtol=1e-11, atol=0)


@some
@given(seed=seeds, low=st.floats(-5, 0), size=st.floats(0.1, 1000))
def test_decays_are_between_the_clamp_and_1(seed, low, size):
    mixer, x = made("gla", seed=seed, log_decay_min=low)
    log_decay = mixer._log_decay(size * x)
    assert (low <= log_decay).all()
    assert (log_decay <= 0).all()


@some
@given(seed=seeds, order=st.permutations(range(2)))
def test_the_order_of_the_keys_is_nothing(seed, order):
    mixer, x = made("gla", seed=seed)
    turned, _ = made("gla", seed=seed)
    place = (
        torch.arange(mixer.num_heads * mixer.head_k)
        .unflatten(0, (-1, mixer.head_k))[:, list(order)]
        .flatten()
    )
    with torch.no_grad():
        for p in (turned.query_proj.weight, turned.key_proj.weight, *turned.decay_proj[1].parameters()):
            p.copy_(p[place])
    same(mixer, turned, x)


@some
@given(seed=seeds)
def test_one_decay_for_all_keys_is_a_decay_of_the_weights(seed):
    mixer, x = made("gla", seed=seed, num_heads=1, expand_k=1.0)
    with torch.no_grad():
        for p in mixer.decay_proj[1].parameters():
            p.copy_(p[:1].expand_as(p))
    c = mixer._log_decay(x)[..., 0].cumsum(1)
    weight = torch.exp(c[:, :, None] - c[:, None]).tril()
    scores = mixer.query_proj(x) @ mixer.key_proj(x).mT / D**0.5 * weight
    o = mixer.norm(scores @ mixer.value_proj(x))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(o * torch.nn.functional.silu(mixer.gate_proj(x))))


def test_starts_near_its_documented_decay():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("gla", 256)
    decay = mixer._log_decay(torch.randn(4, 64, 256)).exp()
    assert decay.mean().item() == pytest.approx(0.5 ** (1 / 16), abs=3e-3)
    assert seqzoo.create_mixer("gla", 256).state_size(1) == 4 * 256**2 // 8


def test_the_normaliser_in_float16_does_not_overflow():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("gla", 16, feature_map="elu", normalize=True, log_decay_min=0.0).half()
    x = torch.randn(1, 2048, 16, dtype=torch.float16)
    x[..., 0] = 1
    with torch.no_grad():
        mixer.key_proj.weight[:, 0] = mixer.query_proj.weight[:, 0] = 6.0
    y, state = mixer(x)
    assert state.z.max() * 5 * 2 > torch.finfo(torch.float16).max
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": "silu"}, r"feature_map.*'elu', 'relu', None.*'silu'"),
        ({"normalize": True}, r"gla: .*feature_map.*normalize.*None"),
        ({"normalizer_eps": 0.0}, r"gla: .*normalizer_eps.*0\.0"),
        ({"log_decay_min": 0.1}, r"gla: .*log_decay_min.*at most 0.*0\.1"),
        ({"conv_size": -1}, r"gla: .*conv_size >= 0.*-1"),
        ({"gate_rank": 0}, r"gla: .*gate_rank.*at least 1.*0"),
        ({"gate_normalizer": 0.0}, r"gla: .*gate_normalizer above 0.*0\.0"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        seqzoo.create_mixer("gla", D, **options)
