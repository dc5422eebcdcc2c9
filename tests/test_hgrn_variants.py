"""The published variants and ablations of HGRN, HGRN2 and LRU: their formulas in numpy loops, and how they relate."""

import math

import numpy as np
import pytest
import torch
from formulas import (
    D,
    T,
    close,
    count,
    layer_norm,
    linear,
    made,
    same,
    seeds,
    set_to,
    sigmoid,
    silu,
    some,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import seqzoo


class TestHGRN:
    @pytest.mark.parametrize("forget_gate", [True, False])
    @pytest.mark.parametrize("lower_bound", [None, 0.0, 0.3])
    def test_the_published_cores(self, forget_gate, lower_bound):
        mixer, x = made("hgru", forget_gate=forget_gate, lower_bound=lower_bound)
        w, gamma, y = weights(mixer), lower_bound or 0.0, np.zeros((2, T, D))
        for b in range(2):
            h = np.zeros(D, complex)
            for t, x_t in enumerate(x[b].numpy()):
                c = silu(linear(w, "in_proj", x_t))
                c = c[0::2] + 1j * c[1::2]
                f = gamma + (1 - gamma) * sigmoid(linear(w, "forget_proj", x_t))
                turn = np.exp(1j * w["phase"])
                if forget_gate:
                    h = f * turn * h + (1 - f) * c
                elif lower_bound is None:
                    h = turn * h + f * c
                else:
                    h = gamma * turn * h + f * c
                feature = layer_norm(np.concatenate([h.real, h.imag]), w)
                y[b, t] = linear(w, "out_proj", feature * silu(linear(w, "gate_proj", x_t)))
        close(mixer, x, y)

    @pytest.mark.parametrize("forget_gate", [True, False])
    @pytest.mark.parametrize("lower_bound", [None, 0.0, 0.3])
    def test_the_published_cores_of_the_real_unit(self, forget_gate, lower_bound):
        mixer, x = made(
            "hgru_real", forget_gate=forget_gate, lower_bound=lower_bound, norm_position="post_gate"
        )
        w, gamma, y = weights(mixer), lower_bound or 0.0, np.zeros((2, T, D))
        for b in range(2):
            h = np.zeros(D)
            for t, x_t in enumerate(x[b].numpy()):
                c = silu(linear(w, "in_proj", x_t))
                f = gamma + (1 - gamma) * sigmoid(linear(w, "forget_proj", x_t))
                decay = f if forget_gate else 1.0 if lower_bound is None else gamma
                h = decay * h + (1 - f if forget_gate else f) * c
                y[b, t] = linear(w, "out_proj", layer_norm(h * silu(linear(w, "gate_proj", x_t)), w))
        close(mixer, x, y)

    @pytest.mark.parametrize(
        "options",
        [
            {"norm_position": "post_gate"},
            {"gate_rank": 3, "gate_act": "sigmoid"},
            {"gate_rank": 3, "gate_act": "sigmoid", "norm_position": "post_gate", "bias": False},
        ],
        ids=["paper", "version 2", "version 3"],
    )
    def test_the_published_outputs(self, options):
        mixer, x = made("hgru", lower_bound=0.2, **options)
        w, y = weights(mixer), np.zeros((2, T, D))
        act = {"silu": silu, "sigmoid": sigmoid}[options.get("gate_act", "silu")]

        def projected(name, x_t):
            parts = [f"{name}.0", f"{name}.1"] if "gate_rank" in options else [name]
            for part in parts:
                x_t = linear(w, part, x_t)
            return x_t

        for b in range(2):
            h = np.zeros(D, complex)
            for t, x_t in enumerate(x[b].numpy()):
                c = silu(linear(w, "in_proj", x_t))
                f = 0.2 + 0.8 * sigmoid(projected("forget_proj", x_t))
                h = f * np.exp(1j * w["phase"]) * h + (1 - f) * (c[0::2] + 1j * c[1::2])
                feature, gate = np.concatenate([h.real, h.imag]), act(projected("gate_proj", x_t))
                after = options.get("norm_position") == "post_gate"
                mixed = layer_norm(feature * gate, w) if after else layer_norm(feature, w) * gate
                y[b, t] = linear(w, "out_proj", mixed)
        close(mixer, x, y)

    @pytest.mark.parametrize(
        "options",
        [
            {"expand": 2, "gate_act": "sigmoid", "norm_position": "post_gate"},
            {"norm": "rms", "bias": False, "conv_size": 4},
            {"norm": "simple_rms", "expand": 2, "conv_size": 1, "norm_position": "post_gate"},
        ],
        ids=["hgru2-pytorch", "flash-linear-attention", "others"],
    )
    def test_the_published_outputs_of_the_real_unit(self, options):
        mixer, x = made("hgru_real", lower_bound=0.2, **options)
        w, inner, y = weights(mixer), D * options.get("expand", 1), np.zeros((2, T, D))
        act = {"silu": silu, "sigmoid": sigmoid}[options.get("gate_act", "silu")]
        taps = options.get("conv_size", 0)

        def normed(h):
            if options.get("norm", "layer") == "layer":
                return layer_norm(h, w)
            return h / np.sqrt((h**2).mean() + 1e-5) * w.get("norm.weight", 1)

        for b in range(2):
            h, line = np.zeros(inner), np.zeros((taps, 2 * inner))
            for t, x_t in enumerate(x[b].numpy()):
                u = np.concatenate([linear(w, "in_proj", x_t), linear(w, "forget_proj", x_t)])
                if taps:
                    line = np.concatenate([line[1:], u[None]])
                    u = (line * w["conv.weight"].T).sum(0)
                f = 0.2 + 0.8 * sigmoid(u[inner:])
                h = f * h + (1 - f) * silu(u[:inner])
                gate = act(linear(w, "gate_proj", x_t))
                after = options.get("norm_position") == "post_gate"
                y[b, t] = linear(w, "out_proj", normed(h * gate) if after else normed(h) * gate)
        close(mixer, x, y)

    @pytest.mark.parametrize("name", ["hgru", "hgru_real", "hgrn2"])
    def test_without_a_bound_the_stack_has_no_say(self, name):
        mixer, x = made(name, lower_bound=None)
        plain, _ = made(name)
        handed = {"lower_bound": torch.full((D,), 0.4, dtype=torch.float64)}
        assert torch.equal(mixer(x, shared=handed)[0], plain(x)[0])
        assert not torch.equal(plain(x, shared=handed)[0], plain(x)[0])

    @pytest.mark.parametrize("name", ["hgru", "hgru_real"])
    def test_without_forget_gate_and_with_bound_0_there_is_no_memory(self, name):
        mixer, x = made(name, forget_gate=False)
        bound = torch.zeros(D, dtype=torch.float64, requires_grad=True)
        y, _ = mixer(x, shared={"lower_bound": bound})
        for t in range(T):
            torch.testing.assert_close(mixer(x[:, t : t + 1])[0], y[:, t : t + 1])
        (grad,) = torch.autograd.grad(y.sum(), bound)
        assert grad.isfinite().all()

    @some
    @given(seed=seeds)
    def test_without_forget_gate_and_bound_nothing_decays(self, seed):
        mixer, _ = made("hgru", seed=seed, forget_gate=False, lower_bound=None, bias=False)
        state = mixer.init_state(2)._replace(h=torch.randn(2, D, 2, dtype=torch.float64))
        _, final = mixer(torch.zeros(2, T, D, dtype=torch.float64), state)
        torch.testing.assert_close(final.h.norm(dim=-1), state.h.norm(dim=-1))

    @some
    @given(seed=seeds, gamma=st.floats(0, 0.99))
    def test_the_state_is_a_convex_combination(self, seed, gamma):
        mixer, x = made("hgru", seed=seed, lower_bound=gamma)
        c = torch.view_as_complex(F.silu(mixer.in_proj(3 * x)).unflatten(-1, (D, 2)).contiguous())
        h = torch.view_as_complex(mixer(3 * x)[1].h)
        assert (h.abs() <= c.abs().amax(1) + 1e-12).all()

    def test_a_constant_input_is_approached(self):
        mixer, x = made("hgru_real")
        x = x[:, :1].expand(-1, 400, -1)
        torch.testing.assert_close(mixer(x)[1].h, F.silu(mixer.in_proj(x[:, 0])))

    def test_no_phase_is_two_real_units(self):
        mixer, x = made("hgru")
        set_to(mixer, phase=0.0)
        h = mixer(x)[1].h
        for k in range(2):
            real, _ = made("hgru_real")
            set_to(
                real,
                in_proj__weight=mixer.in_proj.weight[k::2],
                in_proj__bias=mixer.in_proj.bias[k::2],
                forget_proj__weight=mixer.forget_proj.weight,
                forget_proj__bias=mixer.forget_proj.bias,
            )
            torch.testing.assert_close(real(x)[1].h, h[..., k])

    @pytest.mark.parametrize("norm_position", ["pre_gate", "post_gate"])
    def test_low_rank_gates(self, norm_position):
        r = 5
        mixer, x = made("hgru", gate_rank=r, gate_act="sigmoid", norm_position=norm_position)
        full, _ = made("hgru", gate_act="sigmoid", norm_position=norm_position)
        others = {
            k: v for k, v in mixer.state_dict().items() if "forget_proj" not in k and "gate_proj" not in k
        }
        full.load_state_dict(others, strict=False)
        for name in ("forget_proj", "gate_proj"):
            inner, outer = mixer.get_submodule(name)
            set_to(
                full,
                **{
                    f"{name}__weight": outer.weight @ inner.weight,
                    f"{name}__bias": outer.weight @ inner.bias + outer.bias,
                },
            )
        same(mixer, full, x)
        assert sum(p.numel() for n, p in mixer.named_parameters() if "proj" in n and p.dim() == 2) == (
            4 * D * D + 5 * D * r
        )

    def test_hgrn2_of_width_1_is_the_real_unit_with_an_output_gate(self):
        mixer, x = made("hgrn2", num_heads=D, value_act="silu", lower_bound=0.2)
        real, _ = made(
            "hgru_real",
            norm="simple_rms",
            norm_position="post_gate",
            bias=False,
            lower_bound=0.2,
            norm_eps=1e-6,
        )
        names = {
            "in_proj": "value_proj",
            "forget_proj": "forget_proj",
            "gate_proj": "query_proj",
            "out_proj": "out_proj",
        }
        for own, its in names.items():
            set_to(real, **{f"{own}__weight": mixer.get_parameter(f"{its}.weight")})
        same(mixer, real, x)

    RECIPES = {
        "language models": {"norm": "simple_rms"},
        "language models, with a scale and convolutions": {
            "norm": "rms", "scale": 0.5, "conv_size": 4, "norm_eps": 1e-5,
        },
        "long-range and recall": {"query_act": "sigmoid", "value_act": "silu", "norm": "layer", "bias": True},
    }  # fmt: skip

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_recipes_of_hgrn2(self, recipe):
        options = self.RECIPES[recipe]
        mixer, x = made("hgrn2", num_heads=4, lower_bound=0.3, **options)
        w, n, y = weights(mixer), D // 4, np.zeros((2, T, D))
        eps = options.get("norm_eps", 1e-6)
        act = {"silu": silu, "sigmoid": sigmoid, None: lambda a: a}
        taps = options.get("conv_size", 0)
        for b in range(2):
            s, line = np.zeros((4, n, n)), np.zeros((max(taps - 1, 0), 3 * D))
            for t, x_t in enumerate(x[b].numpy()):
                u = np.concatenate([linear(w, f"{p}_proj", x_t) for p in ("query", "forget", "value")])
                if taps:
                    line = np.concatenate([line[1 - taps :], u[None]])
                    u = (line * w["conv.weight"].T).sum(0)
                q, z, v = u.reshape(3, 4, n)
                q, v = act[options.get("query_act", "silu")](q), act[options.get("value_act")](v)
                f = 0.3 + 0.7 * sigmoid(z)
                s = f[:, :, None] * s + (1 - f)[:, :, None] * v[:, None, :]
                o = options.get("scale", 1.0) * np.einsum("hk,hkv->hv", q, s).reshape(-1)
                if options["norm"] == "layer":
                    o = layer_norm(o, w, eps=eps)
                else:
                    o = o / np.sqrt((o**2).mean() + eps) * w.get("norm.weight", 1)
                y[b, t] = linear(w, "out_proj", o)
        close(mixer, x, y)

    @pytest.mark.parametrize("name", ["hgru", "hgru_real", "hgrn2"])
    @pytest.mark.parametrize("bound", [-0.1, 1.0])
    def test_a_bound_outside_0_to_1_is_an_error(self, name, bound):
        with pytest.raises(ValueError, match=rf"{name}: .*lower_bound in \[0, 1\).*{bound}"):
            seqzoo.create_mixer(name, D, lower_bound=bound)

    def test_other_wrong_options(self):
        with pytest.raises(ValueError, match=r"hgru: .*gate_rank.*at least 1.*0"):
            seqzoo.create_mixer("hgru", D, gate_rank=0)
        with pytest.raises(ValueError, match=r"hgrn2: .*conv_size >= 0.*-1"):
            seqzoo.create_mixer("hgrn2", D, conv_size=-1)


class TestLRUForget:
    @pytest.mark.parametrize("gamma", ["static", "dynamic"])
    @pytest.mark.parametrize("gate_bias", [None, -1.0])
    def test_formula(self, gamma, gate_bias):
        n = 12
        mixer, x = made("lru_forget", state_dim=n, gamma=gamma, gate_bias=gate_bias)
        w, y = weights(mixer), np.zeros((2, T, D))
        m = np.exp(-np.exp(w["nu_log"]))
        B, C = w["B_re"] + 1j * w["B_im"], w["C_re"] + 1j * w["C_im"]
        for b in range(2):
            h = np.zeros(n, complex)
            for t, x_t in enumerate(x[b].numpy()):
                m_t = m + (1 - m) * sigmoid(linear(w, "forget_proj", x_t))
                gain = np.exp(w["gamma_log"]) if gamma == "static" else np.sqrt(1 - m_t**2)
                h = m_t * np.exp(1j * np.exp(w["theta_log"])) * h + gain * (B @ x_t)
                y[b, t] = (C @ h).real + w["D"] * x_t
        close(mixer, x, y)
        static = 5 * D * n + 3 * n + D
        assert count(mixer) == static - n * (gamma == "dynamic") + n * (gate_bias is not None)

    @some
    @given(seed=seeds, r_min=st.floats(0, 0.9))
    def test_a_closed_gate_is_lru(self, seed, r_min):
        mixer, x = made("lru_forget", seed=seed, r_min=r_min, gate_bias=-40.0)
        plain, _ = made("lru", seed=seed, r_min=r_min)
        plain.load_state_dict(mixer.state_dict(), strict=False)
        set_to(mixer, forget_proj__weight=0.0)
        same(mixer, plain, x)

    @some
    @given(seed=seeds, size=st.floats(0.1, 100))
    def test_the_modulus_is_between_lru_and_1(self, seed, size):
        mixer, x = made("lru_forget", seed=seed)
        log_decay, _ = mixer._decay_and_gain(size * x, torch.float64)
        assert (log_decay >= -mixer.nu_log.exp() * (1 + 1e-12)).all()
        assert (log_decay <= 0).all()

    def test_without_phase_and_with_tied_gates_it_is_the_recurrence_of_the_real_unit(self):
        mixer, x = made("lru_forget")
        set_to(mixer, theta_log=-math.inf)
        gates = mixer._decay_and_gain

        def tied(x, dtype):  # 1 - m_t in the place of e^gamma
            log_decay, _ = gates(x, dtype)
            return log_decay, -torch.expm1(log_decay)

        mixer._decay_and_gain = tied
        h = mixer(x)[1].h.detach().numpy()
        w = weights(mixer)
        m = np.exp(-np.exp(w["nu_log"]))[:, None]  # the lower bound
        for b in range(2):
            real = np.zeros((D, 2))
            for x_t in x[b].numpy():
                f = m + (1 - m) * sigmoid(linear(w, "forget_proj", x_t))[:, None]
                real = f * real + (1 - f) * np.stack([w["B_re"] @ x_t, w["B_im"] @ x_t], -1)
            np.testing.assert_allclose(h[b], real, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize(
        ("gamma", "variance"), [("static", (1 - 0.9**2) / (1 - 0.95**2)), ("dynamic", 1.0)]
    )
    def test_variance_of_the_state_for_white_input(self, gamma, variance):
        mixer, _ = made("lru_forget", state_dim=64, gamma=gamma)
        set_to(mixer, forget_proj__weight=0.0, nu_log=math.log(-math.log(0.9)))
        if gamma == "static":
            set_to(mixer, gamma_log=0.5 * math.log(1 - 0.9**2))
        x = torch.randn(500, 80, D, dtype=torch.float64)
        white = (mixer.B_re.square() + mixer.B_im.square()).sum(1)  # variance of each x B
        h = mixer(x)[1].h
        assert (h.square().sum(-1).mean(0) / white).mean().item() == pytest.approx(variance, rel=0.05)

    @pytest.mark.parametrize("gamma", ["static", "dynamic"])
    def test_extreme_gates_have_finite_gradients(self, gamma):
        mixer, x = made("lru_forget", gamma=gamma)
        mixer, x = mixer.float(), 1e4 * x.float()
        y, _ = mixer(x)
        y.sum().backward()
        assert all(p.grad.isfinite().all() for p in mixer.parameters())

    def test_start(self):
        torch.manual_seed(0)
        mixer = seqzoo.create_mixer("lru_forget", 64, state_dim=4096, r_min=0.4, r_max=0.9, gate_bias=-4.0)
        squared = torch.exp(-2 * mixer.nu_log.exp())
        assert squared.mean().item() == pytest.approx((0.4**2 + 0.9**2) / 2, abs=0.01)
        assert squared.std().item() == pytest.approx((0.9**2 - 0.4**2) / math.sqrt(12), abs=0.01)
        torch.testing.assert_close(torch.exp(2 * mixer.gamma_log), 1 - squared)
        assert (mixer.forget_proj.bias == -4).all()
        assert mixer.forget_proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.02)

    def test_trains_as_lru(self):
        mixer, _ = made("lru_forget")
        plain, _ = made("lru")
        for name, p in plain.named_parameters():
            assert mixer.param_rule(name, p) == plain.param_rule(name, p)
        assert mixer.param_rule("forget_proj.weight", mixer.forget_proj.weight) == (1.0, True)

    def test_wrong_options(self):
        with pytest.raises(ValueError, match=r"lru_forget: .*gamma.*'static', 'dynamic'.*'both'"):
            seqzoo.create_mixer("lru_forget", D, gamma="both")
        with pytest.raises(ValueError, match=r"lru_forget: .*r_min < r_max.*0\.5 and 0\.4"):
            seqzoo.create_mixer("lru_forget", D, r_min=0.5, r_max=0.4)
        for name in ("lru", "lru_forget"):
            with pytest.raises(ValueError, match=rf"{name}: .*max_phase above 0.*0\.0"):
                seqzoo.create_mixer(name, D, max_phase=0.0)
            with pytest.raises(ValueError, match=rf"{name}: .*state_dim.*at least 1.*0"):
                seqzoo.create_mixer(name, D, state_dim=0)
