"""Each mixer against its paper's formula, written out token by token in float64 without our ops."""

import math

import pytest
import torch
from torch.nn import functional as F

import seqzoo

D, T = 32, 11


def made(name, **options):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, D, **options).double()
    return mixer, torch.randn(2, T, D, dtype=torch.float64)


def check(mixer, x, y, **call):
    torch.testing.assert_close(mixer(x, **call)[0], y, rtol=1e-9, atol=1e-11)


def heads(x, n):
    return x.unflatten(-1, (n, -1))


@pytest.mark.parametrize("norm_position", ["pre_gate", "post_gate"])
@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_hgru(norm_position, gamma):
    mixer, x = made("hgru", norm_position=norm_position)
    h, out = torch.zeros(2, D, dtype=torch.complex128), []
    for x_t in x.unbind(1):
        c = F.silu(mixer.in_proj(x_t))
        c = torch.complex(c[:, 0::2], c[:, 1::2])
        f = gamma + (1 - gamma) * torch.sigmoid(mixer.forget_proj(x_t))
        h = f * torch.exp(1j * mixer.phase) * h + (1 - f) * c
        feature, gate = torch.cat([h.real, h.imag], -1), F.silu(mixer.gate_proj(x_t))
        mixed = mixer.norm(feature) * gate if norm_position == "pre_gate" else mixer.norm(feature * gate)
        out.append(mixer.out_proj(mixed))
    bound = torch.full((D,), gamma, dtype=torch.float64)
    check(mixer, x, torch.stack(out, 1), shared={"lower_bound": bound} if gamma else None)
    phase = 10000.0 ** (-2 * torch.arange(D) / D)
    torch.testing.assert_close(mixer.phase.float(), phase)
    assert sum(p.numel() for n, p in mixer.named_parameters() if n.endswith("proj.weight")) == 7 * D * D


def test_hgru_real_with_convolution_and_expansion():
    mixer, x = made("hgru_real", expand=2, conv_size=3, lower_bound=0.2)
    line = F.pad(torch.cat([mixer.in_proj(x), mixer.forget_proj(x)], -1), (0, 0, 2, 0))
    h, out = torch.zeros(2, 2 * D, dtype=torch.float64), []
    for t in range(T):
        c, z = (line[:, t : t + 3] * mixer.conv.weight.T).sum(1).chunk(2, -1)
        f = 0.2 + 0.8 * torch.sigmoid(z)
        h = f * h + (1 - f) * F.silu(c)
        out.append(mixer.out_proj(mixer.norm(h) * F.silu(mixer.gate_proj(x[:, t]))))
    check(mixer, x, torch.stack(out, 1))


@pytest.mark.parametrize("num_heads", [1, 4, D])
def test_hgrn2(num_heads):
    mixer, x = made("hgrn2", num_heads=num_heads)
    n = D // num_heads
    s, out = torch.zeros(2, num_heads, n, n, dtype=torch.float64), []
    for x_t in x.unbind(1):
        f = heads(torch.sigmoid(mixer.forget_proj(x_t)), num_heads)
        q, v = heads(F.silu(mixer.query_proj(x_t)), num_heads), heads(mixer.value_proj(x_t), num_heads)
        s = f[..., None] * s + (1 - f)[..., None] * v[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", q, s).flatten(1)
        out.append(mixer.out_proj(o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()))
    check(mixer, x, torch.stack(out, 1))
    assert sum(p.numel() for p in mixer.parameters()) == 4 * D * D


def test_gla():
    mixer, x = made("gla")
    assert (mixer.num_heads, mixer.head_k, mixer.head_v) == (4, D // 8, D // 4)
    s, out = torch.zeros(2, 4, D // 8, D // 4, dtype=torch.float64), []
    for x_t in x.unbind(1):
        decay = heads(torch.sigmoid(mixer.decay_proj(x_t)) ** (1 / 16), 4)
        q, k, v = (heads(proj(x_t), 4) for proj in (mixer.query_proj, mixer.key_proj, mixer.value_proj))
        s = decay[..., None] * s + k[..., None] * v[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", q, s) / math.sqrt(D // 8)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
        out.append(mixer.out_proj(o.flatten(1) * F.silu(mixer.gate_proj(x_t))))
    check(mixer, x, torch.stack(out, 1))
    weights = sum(
        p.numel() for name, p in mixer.named_parameters() if name.endswith("weight") and p.dim() == 2
    )
    assert weights == 4 * D * D + 24 * D


def test_lru():
    mixer, x = made("lru", state_dim=24)
    lam = torch.exp(torch.complex(-mixer.nu_log.exp(), mixer.theta_log.exp()))
    b, c = torch.complex(mixer.B_re, mixer.B_im), torch.complex(mixer.C_re, mixer.C_im)
    h, out = torch.zeros(2, 24, dtype=torch.complex128), []
    for x_t in x.unbind(1):
        h = lam * h + mixer.gamma_log.exp() * (x_t.to(b.dtype) @ b.T)
        out.append((h @ c.T).real + mixer.D * x_t)
    check(mixer, x, torch.stack(out, 1))
    assert sum(p.numel() for p in mixer.parameters()) == 4 * D * 24 + 3 * 24 + D


@pytest.mark.parametrize("name", ["lru", "lru_forget"])
def test_lru_trains_its_recurrence_at_half_the_rate_without_decay(name):
    mixer, _ = made(name)
    groups = {(g["lr"], g["weight_decay"]): g["params"] for g in mixer.param_groups(lr=0.1, weight_decay=0.2)}
    names = {p: n for n, p in mixer.named_parameters()}
    got = {rule: {names[p] for p in group} for rule, group in groups.items()}
    output = {"C_re", "C_im", "D"} | ({"forget_proj.weight"} if name == "lru_forget" else set())
    recurrence = {"nu_log", "theta_log", "gamma_log", "B_re", "B_im"}
    assert got == {(0.05, 0.0): recurrence, (0.1, 0.2): output}
    torch.optim.AdamW(mixer.param_groups(lr=0.1, weight_decay=0.2))


def test_lru_starts_with_unit_variance_and_a_uniform_squared_radius():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("lru", 64, state_dim=4096, r_min=0.4, r_max=0.9)
    squared = torch.exp(-2 * mixer.nu_log.exp())
    assert (squared.sqrt() >= 0.4).all()
    assert (squared.sqrt() <= 0.9).all()
    assert squared.mean().item() == pytest.approx((0.4**2 + 0.9**2) / 2, abs=0.02)
    gain = torch.exp(2 * mixer.gamma_log) / (1 - squared)
    torch.testing.assert_close(gain, torch.ones_like(gain))


@pytest.mark.parametrize("options", [{}, {"window": 4, "num_kv_heads": 1, "num_heads": 4, "qk_norm": True}])
def test_attention(options):
    mixer, x = made("attention", **options)
    h, g, k = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    query, key = heads(mixer.query_proj(x), h), heads(mixer.key_proj(x), g)
    value = heads(mixer.value_proj(x), g)
    if options.get("qk_norm"):
        query, key = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))

    def turned(vector, position):
        angle = position * 10000.0 ** (-2 * torch.arange(k // 2, dtype=torch.float64) / k)
        number = torch.complex(vector[..., : k // 2], vector[..., k // 2 :]) * torch.exp(1j * angle)
        return torch.cat([number.real, number.imag], -1)

    out = torch.zeros(2, T, h, k, dtype=torch.float64)
    for i in range(T):
        seen = range(max(0, i - options.get("window", T) + 1), i + 1)
        for head in range(h):
            group = head // (h // g)
            scores = [
                (turned(query[:, i, head], i) * turned(key[:, j, group], j)).sum(-1) / math.sqrt(k)
                for j in seen
            ]
            weights = torch.stack(scores).softmax(0)
            out[:, i, head] = sum(w[:, None] * value[:, j, group] for w, j in zip(weights, seen, strict=True))
    check(mixer, x, mixer.out_proj(out.flatten(2)))


def test_an_odd_head_cannot_turn():
    with pytest.raises(ValueError, match=r"even rotary_dim.*5"):
        seqzoo.create_mixer("attention", 20, head_dim=5)
    seqzoo.create_mixer("attention", 20, head_dim=5, rope=False)


@pytest.mark.parametrize("name", ["attention", "fox", "gla", "linear_attention"])
def test_no_heads_are_not_the_default(name):
    with pytest.raises(ValueError, match=r"num_kv_heads.*0"):
        seqzoo.create_mixer(name, 64, num_kv_heads=0)


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_defaults_fit_any_multiple_of_4(name):
    for dim in (16, 20, 36, 44, 68, 100):
        assert seqzoo.create_mixer(name, dim)(torch.randn(1, 3, dim))[0].shape == (1, 3, dim)
    for dim in (0, 12, 18, 33, 64.0):
        with pytest.raises(ValueError, match=r"multiple of 4 and at least 16"):
            seqzoo.create_mixer(name, dim)
