"""What the papers of linear recurrences and of attention state of their mixers, over drawn weights and inputs, and stacks."""

import math

import numpy as np
import pytest
import torch
from formulas import D, made, seeds, set_to, sigmoid, some, weights
from hypothesis import given
from hypothesis import strategies as st

import seqzoo
from seqzoo import LanguageModel, LowerBounds
from seqzoo.layers import rotate, rotation
from seqzoo_kernels import linear_scan
from seqzoo_kernels.forget_gate import forget_gate

T = 12


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# the scan


@some
@given(seed=seeds, cut=st.integers(0, T))
def test_two_steps_of_a_scan_are_one(seed, cut):
    """(a_1, b_1) then (a_2, b_2) is (a_2 a_1, a_2 b_1 + b_2), for parts of any length."""
    g, x = -drawn(1, T, D, seed=seed).square(), drawn(1, T, D, seed=seed + 1)
    parts = []
    for part in (slice(0, cut), slice(cut, T)):
        parts.append((g[:, part].sum(1).exp(), linear_scan(g[:, part], x[:, part])[1]))
    (a_1, b_1), (a_2, b_2) = parts
    start = drawn(1, D, seed=seed + 2)
    whole = linear_scan(g, x, initial_state=start)[1]
    torch.testing.assert_close(whole, a_2 * a_1 * start + a_2 * b_1 + b_2)


@some
@given(seed=seeds, place=st.integers(0, T - 1))
def test_a_decay_of_0_starts_anew(seed, place):
    g, x = -drawn(1, T, D, seed=seed).square(), drawn(1, T, D, seed=seed + 1)
    g[:, place] = -torch.inf
    h, final = linear_scan(g, x, initial_state=drawn(1, D, seed=seed + 2))
    alone, last = linear_scan(g[:, place:], x[:, place:])
    assert torch.equal(h[:, place:], alone)
    assert torch.equal(final, last)


# HGRN


@some
@given(logit=st.floats(-700, 700), gamma=st.floats(0, 0.999))
def test_the_forget_gate_is_between_its_bound_and_1(logit, gamma):
    log_f, open_part = forget_gate(torch.tensor([logit], dtype=torch.float64), gamma)
    with np.errstate(divide="ignore"):
        paper = np.logaddexp(np.log(gamma), np.log1p(-gamma) - np.logaddexp(0, -logit))
    assert math.log(gamma or 5e-324) <= log_f.item() + 1e-15
    assert log_f.item() <= 0
    np.testing.assert_allclose(log_f.item(), paper, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(open_part.item(), (1 - gamma) * sigmoid(-logit), rtol=1e-12)


@some
@given(seed=seeds, form=st.sampled_from(["lm", "exclusive"]), layers=st.integers(1, 9), size=st.floats(0, 8))
def test_lower_bounds_grow_with_depth_from_0_and_stay_below_1(seed, form, layers, size):
    bounds = LowerBounds(layers, D, form).double()
    with torch.no_grad():
        bounds.logits.copy_(size * drawn(layers, D, seed=seed))
    gamma = bounds()
    assert not gamma[0].any()
    assert (gamma.diff(dim=0) > 0).all()
    assert (gamma < 1).all()


@pytest.mark.parametrize("name", ["hgru", "hgru_real", "hgrn2"])
def test_a_full_forget_gate_keeps_the_state(name):
    mixer, x = made(name, bias=True)
    set_to(mixer, forget_proj__weight=0.0, forget_proj__bias=1e3)
    if name == "hgru":
        set_to(mixer, phase=0.0)  # else it turns
    start = mixer.init_state(2)
    start = start._replace(**{start._fields[0]: torch.randn_like(start[0])})
    assert torch.equal(mixer(x, start)[1][0], start[0])


@pytest.mark.parametrize("name", ["hgru", "hgru_real", "hgrn2"])
def test_hgrn_starts_with_longer_memory_in_deeper_layers(name):
    torch.manual_seed(0)
    net = seqzoo.Backbone(64, 4, mixer=name)
    bounds = net.lower_bounds()
    for k, block in enumerate(net.blocks):
        logits = block.mixer.forget_proj(torch.randn(8, 64, 64))
        log_f, _ = forget_gate(logits, bounds[k])
        assert log_f.exp().mean().item() == pytest.approx((1 + k / 4) / 2, abs=0.02)


def test_hgru_real_has_the_weights_of_its_docstring():
    for expand, taps in ((1, 0), (2, 4)):
        mixer = seqzoo.create_mixer("hgru_real", 64, expand=expand, conv_size=taps)
        inner = 64 * expand
        matrices = sum(p.numel() for n, p in mixer.named_parameters() if n.endswith("proj.weight"))
        assert matrices == 4 * expand * 64**2
        assert sum(p.numel() for p in mixer.parameters()) == matrices + 3 * inner + 64 + 2 * inner * (
            1 + taps
        )
        assert mixer.state_size(1) == 4 * (inner + max(taps - 1, 0) * 2 * inner)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64, 128])
def test_hgrn2_of_every_published_head_width(n):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("hgrn2", 128, num_heads=128 // n).double()
    assert mixer.state_size(1) == 8 * 128 * n
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 128**2
    x = drawn(1, 5, 128)
    y, state = mixer(x)
    assert state.s.shape == (1, 128 // n, n, n)
    f = torch.sigmoid(mixer.forget_proj(x)).unflatten(-1, (-1, n))
    v = mixer.value_proj(x).unflatten(-1, (-1, n))
    s = torch.zeros(128 // n, n, n, dtype=torch.float64)
    for t in range(5):
        s = f[0, t, :, :, None] * s + (1 - f[0, t, :, :, None]) * v[0, t, :, None]
    torch.testing.assert_close(state.s[0], s)
    torch.testing.assert_close(mixer(x, mode="recurrent")[0], y)


@some
@given(seed=seeds, length=st.integers(1, 3), bound=st.floats(0, 0.9))
def test_hgrn2_state_is_a_convex_combination_of_low_rank(seed, length, bound):
    mixer, x = made("hgrn2", seed=seed, num_heads=2, lower_bound=bound)
    x = 3 * x[:, :length]
    s = mixer(x)[1].s
    assert (s.abs() <= mixer.value_proj(x).unflatten(-1, (2, -1)).abs().amax(1)[:, :, None] + 1e-12).all()
    assert (torch.linalg.matrix_rank(s, rtol=1e-9) <= length).all()


# LRU


@some
@given(seed=seeds, size=st.floats(0, 5))
def test_lru_is_stable_whatever_its_parameters(seed, size):
    mixer, _ = made("lru", state_dim=64)
    set_to(mixer, nu_log=size * drawn(64, seed=seed), theta_log=size * drawn(64, seed=seed + 1))
    log_decay, _ = mixer._decay_and_gain(torch.zeros(1, 1, D, dtype=torch.float64), torch.float64)
    assert (log_decay < 0).all()
    start = mixer.init_state(1)._replace(h=drawn(1, 64, 2, seed=seed + 2))
    _, final = mixer(torch.zeros(1, T, D, dtype=torch.float64), start)
    assert (final.h.norm(dim=-1) < start.h.norm(dim=-1)).all()


@pytest.mark.parametrize("seen", [0, 4])
def test_lru_formula(seen):
    mixer, _ = made("lru", state_dim=7)
    w, x = weights(mixer), drawn(2, T, D)
    lam = np.exp(-np.exp(w["nu_log"]) + 1j * np.exp(w["theta_log"]))
    B, C = w["B_re"] + 1j * w["B_im"], w["C_re"] + 1j * w["C_im"]
    _, state = mixer(x[:, :seen])
    y, state = mixer(x[:, seen:], state)
    for b in range(2):
        h = np.zeros(7, complex)
        for t, x_t in enumerate(x[b].numpy()):
            h = lam * h + np.exp(w["gamma_log"]) * (B @ x_t)
            if t >= seen:
                got = y[b, t - seen].detach().numpy()
                np.testing.assert_allclose(got, (C @ h).real + w["D"] * x_t, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(state.h[b].detach().numpy() @ [1, 1j], h, rtol=1e-10, atol=1e-12)


def test_lru_starts_as_documented():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("lru", 128, state_dim=2048, max_phase=0.3)
    deviations = {
        "B_re": (2 * 128) ** -0.5,
        "B_im": (2 * 128) ** -0.5,
        "C_re": 2048**-0.5,
        "C_im": 2048**-0.5,
    }
    for name, wanted in deviations.items():
        assert mixer.get_parameter(name).std().item() == pytest.approx(wanted, rel=0.02)
    assert mixer.D.std().item() == pytest.approx(1, rel=0.2)
    phase = mixer.theta_log.exp()
    assert phase.max() <= 0.3
    assert phase.mean().item() == pytest.approx(0.15, rel=0.05)
    assert phase.std().item() == pytest.approx(0.3 / 12**0.5, rel=0.05)


@some
@given(seed=seeds, n=st.integers(1, 24))
def test_lru_is_the_convolution_with_its_kernel(seed, n):
    mixer, _ = made("lru", seed=seed, state_dim=n)
    x = drawn(2, T, D, seed=seed)
    lam = torch.exp(torch.complex(-mixer.nu_log.exp(), mixer.theta_log.exp()))
    b, c = torch.complex(mixer.B_re, mixer.B_im), torch.complex(mixer.C_re, mixer.C_im)
    lags = torch.arange(T)
    kernel = torch.einsum("dn,ln,nj->ldj", c, lam ** lags[:, None] * mixer.gamma_log.exp(), b).real
    lag = lags[:, None] - lags
    full = torch.where((lag >= 0)[..., None, None], kernel[lag.clamp_min(0)], 0)
    torch.testing.assert_close(mixer(x)[0], torch.einsum("tsdj,bsj->btd", full, x) + mixer.D * x)


def test_lru_state_has_unit_variance_for_white_input():
    mixer, _ = made("lru", state_dim=64, r_min=0.3, r_max=0.95)
    x = drawn(600, 40, D)
    white = (mixer.B_re.square() + mixer.B_im.square()).sum(1)  # variance of each x B
    h = mixer(x)[1].h
    assert (h.square().sum(-1).mean(0) / white).mean().item() == pytest.approx(1, rel=0.03)


# RG-LRU


@some
@given(seed=seeds, size=st.floats(0.01, 100))
def test_rg_lru_never_grows(seed, size):
    mixer, _ = made("rg_lru", seed=seed, conv_size=0, num_heads=2)
    set_to(mixer, in_proj__weight=0.0, in_proj__bias=0.0, recurrence_gate__bias=size * drawn(D, seed=seed))
    start = mixer.init_state(1)._replace(h=drawn(1, D, seed=seed), length=torch.ones(1, dtype=torch.long))
    _, final = mixer(torch.zeros(1, T, D, dtype=torch.float64), start)
    assert (final.h.abs() <= start.h.abs()).all()
    assert (final.h.sign() * start.h.sign() >= 0).all()


@pytest.mark.parametrize("decay_init", ["code", "paper"])
def test_griffin_two_recurrences_to_one_local_attention(decay_init):
    torch.manual_seed(0)
    recurrent = {"name": "rg_lru", "decay_init": decay_init, "expand": 1.5}
    local = {"name": "attention", "window": 5, "num_kv_heads": 1, "num_heads": 4}
    net = LanguageModel(64, 32, 6, mixer=[recurrent, recurrent, local]).double()
    names = [block.mixer.registered_name for block in net.backbone.blocks]
    assert names == ["rg_lru", "rg_lru", "attention"] * 2
    tokens = torch.randint(64, (2, 23))
    whole, last = net(tokens)
    state, parts = None, []
    for part in tokens.split([1, 9, 0, 6, 7], 1):  # shorter and longer than the window and the convolution
        logits, state = net(part, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    next_token = torch.randint(64, (2, 1))
    torch.testing.assert_close(net(next_token, state)[0], net(next_token, last)[0])
    sizes = [net.state_size(t) for t in (5, 50, 500)]
    assert sizes[0] == sizes[1] == sizes[2]
    packed, _ = net(tokens.reshape(1, -1), cu_seqlens=torch.tensor([0, 23, 46]))
    torch.testing.assert_close(packed.unflatten(1, (2, 23))[0], whole)
    net.loss(tokens).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


# attention


@pytest.mark.parametrize("name", ["attention", "fox", "fox_pro"])
def test_heads_that_share_keys_are_heads_with_equal_keys(name):
    grouped, x = made(name, num_heads=4, num_kv_heads=2)
    full, _ = made(name, num_heads=4)
    with torch.no_grad():
        for key, own in full.state_dict().items():
            its = grouped.state_dict()[key]
            if own.shape == its.shape:
                own.copy_(its)
            elif key == "shift_proj.weight":  # a row for each head of keys, then of values
                own.copy_(its.repeat_interleave(2, 0))
            else:
                own.copy_(its.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1))
    torch.testing.assert_close(full(x)[0], grouped(x)[0])


@pytest.mark.parametrize("name", ["attention", "fox", "fox_pro", "transformer_pro"])
def test_a_window_of_the_whole_sequence_is_none(name):
    for window in (9, 100):
        mixer, x = made(name, num_heads=2, window=window)
        whole, _ = made(name, num_heads=2)
        assert x.shape[1] == 9
        torch.testing.assert_close(mixer(x)[0], whole(x)[0], rtol=1e-12, atol=1e-13)


@some
@given(seed=seeds, size=st.floats(0.1, 30), name=st.sampled_from(["attention", "fox"]))
def test_attention_is_a_mean_of_the_values_so_far(seed, size, name):
    mixer, x = made(name, seed=seed, num_heads=2)
    set_to(mixer, out_proj__weight=torch.eye(D))
    y, v = mixer(size * x)[0], mixer.value_proj(size * x)
    assert (y <= v.cummax(1).values + 1e-9).all()
    assert (y >= v.cummin(1).values - 1e-9).all()
    x[..., 0] = 1 / size
    set_to(mixer, value_proj__weight=torch.eye(D)[:1].expand(D, -1))
    torch.testing.assert_close(mixer(size * x)[0], torch.ones_like(x), rtol=1e-12, atol=0)


@some
@given(seed=seeds, order=st.permutations(range(8)))
def test_attention_without_positions_forgets_the_order_of_the_past(seed, order):
    mixer, x = made("attention", seed=seed, num_heads=2, rope=False)
    other = torch.cat([x[:, list(order)], x[:, 8:]], 1)
    torch.testing.assert_close(mixer(other)[0][:, -1], mixer(x)[0][:, -1])


@some
@given(seed=seeds, shift=st.integers(0, 100_000))
def test_rotated_scores_know_distances_alone(seed, shift):
    q, k = drawn(1, T, 2, 8, seed=seed), drawn(1, T, 2, 8, seed=seed + 1)
    scores = []
    for start in (0, shift):
        turn = rotation(torch.arange(start, start + T)[None], 8, 10000.0, torch.float64)
        scores.append(torch.einsum("bihk,bjhk->bhij", rotate(q, *turn), rotate(k, *turn)))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-9)
