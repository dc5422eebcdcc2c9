"""LSTM, its variants, and GRU: their formulas in numpy loops, what is known of them, and the ops under them."""

import math

import numpy as np
import pytest
import torch
from formulas import D, T, close, count, made, same, seeds, set_to, sigmoid, some, weights
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import seqzoo
from seqzoo_kernels import linear_scan
from seqzoo_kernels.gru import gru
from seqzoo_kernels.lstm import CELLS, lstm

VARIANTS = list(CELLS)


def numpy_lstm(variant, w, x, state, n):
    """y [T, n] and c, each gate by its own matrix, as the paper writes them."""
    lacks = {"NIG": "i", "NFG": "f", "NOG": "o", "CIFG": "f"}.get(variant, "")
    ahead = [g for g in "if" if g != lacks]
    order = [*ahead, "z"] + ["o"] * (lacks != "o")
    rows = {g: slice(k * n, (k + 1) * n) for k, g in enumerate(order)}
    gates = [g for g in order if g != "z"]
    c, y = state["c"].copy(), state["y"].copy()
    before = dict(zip("ifo", state["gates"].reshape(-1, n), strict=False))
    out = []
    for x_t in x:

        def logit(g, cell=None, x_t=x_t, y=y, before=before):
            a = (
                w["in_proj.weight"][rows[g]] @ x_t
                + w["in_proj.bias"][rows[g]]
                + w["recurrent_weight"][rows[g]] @ y
            )
            if cell is not None and variant != "NP":
                a = a + w["peephole"][gates.index(g)] * cell
            if g != "z" and variant == "FGR":
                for k, other in enumerate("ifo"):
                    j = "ifo".index(g)
                    matrix = w["gate_weight"][j * n : (j + 1) * n, k * n : (k + 1) * n]
                    a = a + matrix @ before[other]
            return a

        z = logit("z")
        z = z if variant == "NIAF" else np.tanh(z)
        i = 1.0 if variant == "NIG" else sigmoid(logit("i", c))
        f = 1.0 if variant == "NFG" else 1 - i if variant == "CIFG" else sigmoid(logit("f", c))
        new = i * z + f * c
        o = 1.0 if variant == "NOG" else sigmoid(logit("o", new))
        y = o * (new if variant == "NOAF" else np.tanh(new))
        c, before = new, {"i": i, "f": f, "o": o}
        out.append(y)
    return np.stack(out), c


def zeroed_like(variant, wanted):
    """A vanilla LSTM with the weights of `variant`, and the gate that it lacks held by its bias."""
    mixer, _ = made("lstm", variant=variant)
    vanilla, x = made("lstm")
    order = {"i": 0, "f": 1, "z": 2, "o": 3}
    set_to(vanilla, in_proj__weight=0.0, in_proj__bias=40.0, recurrent_weight=0.0, peephole=0.0)
    with torch.no_grad():
        for g in order:
            place = mixer.cell.place(g)
            if place is None:
                continue
            own, its = (slice(k * D, (k + 1) * D) for k in (order[g], place))
            for name in ("in_proj.weight", "in_proj.bias", "recurrent_weight"):
                vanilla.get_parameter(name)[own] = mixer.get_parameter(name)[its]
            if g != "z" and mixer.peephole is not None:
                vanilla.peephole["ifo".index(g)] = mixer.peephole[mixer.cell.gates.index(g)]
        wanted(vanilla, mixer)
    return mixer, vanilla, x


class TestLSTM:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("expand", [1, 2])
    def test_formula(self, variant, expand):
        mixer, x = made("lstm", variant=variant, expand=expand)
        w, n = weights(mixer), expand * D
        state = type(mixer.init_state(0))(*(torch.randn_like(leaf) for leaf in mixer.init_state(2)))
        y = np.zeros((2, T, D))
        for b in range(2):
            given = {name: getattr(state, name)[b].numpy() for name in ("c", "y", "gates")}
            hidden, c = numpy_lstm(variant, w, x[b].numpy(), given, n)
            y[b] = hidden if expand == 1 else hidden @ w["out_proj.weight"].T
            np.testing.assert_allclose(mixer(x, state)[1].c[b].detach().numpy(), c, rtol=1e-10, atol=1e-12)
        close(mixer, x, y, state)

    def test_counts(self):
        for expand in (1, 2):
            n = expand * D
            blocks = {"NIG": 3, "NFG": 3, "NOG": 3, "CIFG": 3}
            for variant in VARIANTS:
                g = blocks.get(variant, 4)
                peepholes = 0 if variant == "NP" else g - 1
                extra = 9 * n * n if variant == "FGR" else 0
                back = n * D * (expand > 1)
                mixer, _ = made("lstm", variant=variant, expand=expand)
                assert count(mixer) == g * (D * n + n * n) + g * n + peepholes * n + extra + back
            vanilla, _ = made("lstm", expand=expand)
            assert count(vanilla) == 4 * (D * n + n * n) + 7 * n + back

    def test_without_peepholes_it_is_torch(self):
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            mixer, x = made("lstm", variant="NP")
            mixer, x = mixer.to(dtype), x.to(dtype)
            theirs = nn.LSTM(D, D, batch_first=True, dtype=dtype)
            set_to(
                mixer,
                in_proj__weight=theirs.weight_ih_l0,
                in_proj__bias=theirs.bias_ih_l0 + theirs.bias_hh_l0,
                recurrent_weight=theirs.weight_hh_l0,
            )
            y, state = mixer(x)
            wanted, (h, c) = theirs(x)
            for got, right in ((y, wanted), (state.y, h[0]), (state.c, c[0])):
                torch.testing.assert_close(got, right, rtol=0, atol=tolerance)
            torch.testing.assert_close(mixer(x, mode="chunked")[0], wanted, rtol=0, atol=tolerance)

    @pytest.mark.parametrize("variant", ["V", "NP"])
    def test_second_derivatives(self, variant):
        mixer, x = made("lstm", variant=variant)
        mixer, x = mixer.float(), x.float().requires_grad_()

        def penalty(mode):
            (grad,) = torch.autograd.grad(mixer(x, mode=mode)[0].square().sum(), x, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), x)[0]

        assert penalty("chunked").abs().sum() > 0
        torch.testing.assert_close(penalty("auto"), penalty("chunked"))

    def test_a_variant_is_the_vanilla_cell_with_the_gate_held(self):
        def nothing(vanilla, mixer):
            pass

        def untied(vanilla, mixer):  # f = 1 - i = sigmoid(-i')
            for p in (vanilla.in_proj.weight, vanilla.in_proj.bias, vanilla.recurrent_weight):
                p[D : 2 * D] = -p[:D]
            vanilla.peephole[1] = -vanilla.peephole[0]

        for variant in ("NIG", "NFG", "NOG", "NP"):
            same(*zeroed_like(variant, nothing))
        same(*zeroed_like("CIFG", untied))
        mixer, vanilla, x = zeroed_like("FGR", nothing)
        set_to(mixer, gate_weight=0.0)
        same(mixer, vanilla, x)

    @some
    @given(seed=seeds, size=st.floats(0.1, 30))
    def test_bounds(self, seed, size):
        for variant in ("V", "CIFG", "NFG", "NOAF"):
            mixer, x = made("lstm", seed=seed, variant=variant)
            y, state = mixer(size * x)
            if variant == "CIFG":
                assert (state.c.abs() <= 1).all()
            assert (state.c.abs() <= T).all()
            assert variant == "NOAF" or (y.abs() <= 1).all()

    def test_a_cell_that_never_forgets_grows(self):
        mixer, x = made("lstm", variant="NFG")
        set_to(mixer, in_proj__weight=0.0, in_proj__bias=40.0, recurrent_weight=0.0, peephole=0.0)
        torch.testing.assert_close(mixer(x)[1].c, torch.full((2, D), float(T), dtype=torch.float64))

    @some
    @given(seed=seeds)
    def test_gates_that_do_not_see_the_state_make_a_linear_scan(self, seed):
        mixer, x = made("lstm", seed=seed, variant="CIFG")
        set_to(mixer, recurrent_weight=0.0, peephole=0.0)
        i, z, o = mixer.in_proj(x).split(D, -1)
        c, final = linear_scan(F.logsigmoid(-i), torch.sigmoid(i) * torch.tanh(z))
        y, state = mixer(x)
        torch.testing.assert_close(y, torch.sigmoid(o) * torch.tanh(c))
        torch.testing.assert_close(state.c, final)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_start(self, variant):
        for expand in (1, 4):
            torch.manual_seed(0)
            mixer = seqzoo.create_mixer("lstm", 64 // expand, variant=variant, expand=expand)
            for parameter in mixer.parameters():
                assert parameter.abs().max() <= 1 / 8
                assert parameter.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.12)

    def test_peepholes_are_vectors_and_do_not_decay(self):
        mixer, _ = made("lstm")
        decayed = [name for name, p in mixer.named_parameters() if mixer.param_rule(name, p).decay]
        assert decayed == ["recurrent_weight", "in_proj.weight"]

    def test_wrong_options(self):
        with pytest.raises(ValueError, match=r"lstm: .*variant.*'V'.*'FGR'.*'GRU'"):
            seqzoo.create_mixer("lstm", D, variant="GRU")
        with pytest.raises(ValueError, match=r"lstm: .*expand >= 1.*0"):
            seqzoo.create_mixer("lstm", D, expand=0)


class TestGRU:
    @pytest.mark.parametrize("expand", [1, 2])
    def test_formula(self, expand):
        mixer, x = made("gru", expand=expand)
        w, n = weights(mixer), expand * D
        state = type(mixer.init_state(0))(torch.randn(2, n, dtype=torch.float64))
        y = np.zeros((2, T, D))
        W, R = w["in_proj.weight"], w["recurrent_weight"]
        r_, z_, h_ = (slice(k * n, (k + 1) * n) for k in range(3))
        for b in range(2):
            h = state.h[b].numpy()
            for t, x_t in enumerate(x[b].numpy()):
                u = W @ x_t + w["in_proj.bias"]
                r, z = sigmoid(u[r_] + R[r_] @ h), sigmoid(u[z_] + R[z_] @ h)
                h = z * h + (1 - z) * np.tanh(u[h_] + r * (R[h_] @ h + w["recurrent_bias"]))
                y[b, t] = h if expand == 1 else w["out_proj.weight"] @ h
        close(mixer, x, y, state)
        assert count(mixer) == 3 * (D * n + n * n) + 4 * n + n * D * (expand > 1)

    def test_it_is_torch(self):
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            mixer, x = made("gru")
            mixer, x = mixer.to(dtype), x.to(dtype)
            theirs = nn.GRU(D, D, batch_first=True, dtype=dtype)
            hidden = theirs.bias_hh_l0.detach()
            set_to(
                mixer,
                in_proj__weight=theirs.weight_ih_l0,
                in_proj__bias=theirs.bias_ih_l0 + F.pad(hidden[: 2 * D], (0, D)),
                recurrent_weight=theirs.weight_hh_l0,
                recurrent_bias=hidden[2 * D :],
            )
            y, state = mixer(x)
            wanted, h = theirs(x)
            torch.testing.assert_close(y, wanted, rtol=0, atol=tolerance)
            torch.testing.assert_close(state.h, h[0], rtol=0, atol=tolerance)

    @some
    @given(seed=seeds, size=st.floats(0.1, 30))
    def test_the_state_is_a_convex_combination(self, seed, size):
        mixer, x = made("gru", seed=seed)
        assert (mixer(size * x)[0].abs() <= 1).all()

    def test_a_full_update_gate_keeps_the_state(self):
        mixer, x = made("gru")
        with torch.no_grad():
            mixer.in_proj.bias[D : 2 * D] = 1e3
        state = mixer.init_state(2)._replace(h=torch.randn(2, D, dtype=torch.float64))
        torch.testing.assert_close(mixer(x, state)[1].h, state.h)

    def test_start(self):
        for expand in (1, 4):
            torch.manual_seed(0)
            for parameter in seqzoo.create_mixer("gru", 64 // expand, expand=expand).parameters():
                assert parameter.abs().max() <= 1 / 8
                assert parameter.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.15)

    def test_wrong_options(self):
        with pytest.raises(ValueError, match=r"gru: .*expand >= 1.*0"):
            seqzoo.create_mixer("gru", D, expand=0)


def op_inputs(name, cu=None, B=2, T=5, n=3):
    """Calls of an op: (function, tensors, options) for each of its variants."""
    rows, shape = (B, (B, T)) if cu is None else (len(cu) - 1, (1, T))
    torch.manual_seed(0)

    def drawn(*size):
        return torch.randn(*size, dtype=torch.float64, requires_grad=True)

    if name == "gru":
        yield gru, [drawn(*shape, 3 * n), drawn(3 * n, n), drawn(n), drawn(rows, n)], {}
        return
    for variant, cell in CELLS.items():
        tensors = [
            drawn(*shape, cell.blocks * n), drawn(cell.blocks * n, cell.seen * n),
            None if variant == "NP" else drawn(len(cell.gates), n), drawn(rows, (cell.seen + 1) * n),
        ]  # fmt: skip
        yield lstm, tensors, {"variant": variant}


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("cu", [None, [0, 0, 2, 4]])
class TestOps:
    def test_gradients_are_those_of_the_reference(self, name, cu):
        pack = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
        for function, (*tensors, state), options in op_inputs(name, cu):
            inputs = [t for t in (*tensors, state) if t is not None]
            for start in (state, None):
                found = []
                for backend in ("torch", "reference"):
                    y, final = function(
                        *tensors, initial_state=start, backend=backend, chunk_size=2, **pack, **options
                    )
                    total = (y * y.detach().cos()).sum() + (final * final.detach().sin()).sum()
                    found.append([y, final, *torch.autograd.grad(total, inputs, allow_unused=True)])
                for got, wanted in zip(*found, strict=True):
                    assert (got is None) == (wanted is None)
                    if got is not None:
                        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)

    def test_second_derivatives(self, name, cu):
        pack = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
        for function, tensors, options in op_inputs(name, cu, T=4, n=2):
            inputs = [t for t in tensors if t is not None]

            def call(*given, function=function, tensors=tensors, options=options):
                filled = iter(given)
                *rest, state = (None if t is None else next(filled) for t in tensors)
                return function(*rest, initial_state=state, **pack, **options)

            assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)

    def test_it_is_a_right_torch_op(self, name, cu):
        for _, tensors, options in op_inputs(name, cu):
            if options.get("variant") in (None, "V", "CIFG", "NP", "FGR"):
                cu_seqlens = None if cu is None else torch.tensor(cu)
                args = (*tensors, cu_seqlens, *options.values(), None, 2, "torch")
                torch.library.opcheck(getattr(torch.ops.seqzoo, name).default, args)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_wrong_inputs_of_the_ops(name):
    function, tensors, options = next(op_inputs(name))
    x, weight, *_ = tensors
    with pytest.raises(ValueError, match=rf"{name}: .*x of .*blocks"):
        function(x[..., :-1], weight, **options)
    with pytest.raises(ValueError, match=rf"{name}: .*weight of shape"):
        function(x, weight[:-1], **options)
    with pytest.raises(TypeError, match=rf"{name}: .*weight of torch.float64, got torch.float32"):
        function(x, weight.float(), **options)
    with pytest.raises(TypeError, match=rf"{name}: .*x of float32 or float64, got torch.bfloat16"):
        function(x.bfloat16(), weight, **options)
    with pytest.raises(ValueError, match=rf"{name}: .*mode.*'chunked', 'recurrent'|{name}: .*mode.*parallel"):
        function(x, weight, mode="parallel", **options)
    with pytest.raises(ValueError, match=rf"{name}: .*initial_state of shape"):
        function(x, weight, initial_state=x[:, 0], **options)
