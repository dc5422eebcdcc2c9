"""FoX, its Pro block and ALiBi: their formulas in numpy float64, what becomes of them at special gates, and their caches."""

import numpy as np
import pytest
import torch
from formulas import D, count, linear, same, set_to, sigmoid, weights
from formulas import made as fresh

import seqzoo
from seqzoo.mixers.attention import alibi_slopes
from seqzoo.states import leaves

NAMES = ["fox", "fox_pro", "transformer_pro"]
ALIBI = {"name": "attention", "alibi": True, "num_heads": 4}
GROUPED = {"num_heads": 4, "num_kv_heads": 2}


def made(name, **options):
    """A mixer in float64 whose weights are no small numbers, nor equal ones, and tokens."""
    mixer, x = fresh(name, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return mixer, x


def log_sigmoid(a):
    return -np.logaddexp(0, -a)


# formulas


def slopes_of(heads):
    """Press et al.: powers of 2, and where they do not suffice every other one of those for twice as many heads."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]
    power = 2 ** int(np.log2(heads))
    return slopes_of(power) + slopes_of(2 * power)[::2][: heads - power]


def turned(vector, position, width, base):
    """The first `width` features turned as complex numbers, whose imaginary parts are the second half."""
    half = width // 2
    number = vector[:half] + 1j * vector[half:width]
    number = number * np.exp(1j * position * base ** (-2 * np.arange(half) / width))
    return np.concatenate([number.real, number.imag, vector[width:]])


def head_norm(vector, scale, head):
    return vector / np.sqrt((vector**2).mean() + 1e-6) * scale[head * len(vector) : (head + 1) * len(vector)]


def gates(mixer, w, x):
    """log f of one row x [T, D]: [T, H]."""
    heads = mixer.num_heads
    if getattr(mixer, "alibi", False):
        constant = -np.array(slopes_of(heads))
    elif "forget_proj.weight" in w:
        return np.stack([log_sigmoid(linear(w, "forget_proj", x_t)) for x_t in x])
    elif "forget_bias" in w:
        constant = log_sigmoid(w["forget_bias"])
    elif getattr(mixer, "forget_gate", None) == "fixed":
        first, last = mixer.config["decay_time_min"], mixer.config["decay_time_max"]
        constant = np.array([-1 / (first * (last / first) ** (h / (heads - 1))) for h in range(heads)])
    else:
        constant = np.zeros(heads)
    return np.tile(constant, (len(x), 1))


def formula(mixer, x, start=0):
    """y of one row x [T, D], whose tokens before `start` nobody sees."""
    w, H, G, K = weights(mixer), mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    pro, T = "shift_proj.weight" in w, len(x)
    q = np.stack([linear(w, "query_proj", x_t) for x_t in x]).reshape(T, H, K)
    k = np.stack([linear(w, "key_proj", x_t) for x_t in x]).reshape(T, G, K)
    v = np.stack([linear(w, "value_proj", x_t) for x_t in x]).reshape(T, G, K)
    if pro:
        share = np.stack([sigmoid(linear(w, "shift_proj", x_t)) for x_t in x])[..., None]
        old_k, old_v = (np.concatenate([np.zeros((1, G, K)), a[:-1]]) for a in (k, v))
        k = share[:, :G] * old_k + (1 - share[:, :G]) * k
        v = share[:, G:] * old_v + (1 - share[:, G:]) * v
    log_f, window, y = gates(mixer, w, x), mixer.window or T, []
    for i in range(start, T):
        o = np.zeros((H, K))
        seen = range(max(start, i - window + 1), i + 1)
        for h in range(H):
            g, scores = h // (H // G), []
            for j in seen:
                query, key = q[i, h], k[j, g]
                if pro:
                    query = head_norm(query, w["query_norm.weight"], h)
                    key = head_norm(key, w["key_norm.weight"], g)
                query, key = (
                    turned(a, p, mixer.rotary_dim, mixer.rope_base) for a, p in ((query, i), (key, j))
                )
                scores.append(query @ key / np.sqrt(K) + log_f[j + 1 : i + 1, h].sum())
            share_of = np.exp(scores - np.max(scores))
            o[h] = share_of / share_of.sum() @ v[seen.start : seen.stop, g]
        if pro:
            o = np.stack([head_norm(o[h], w["norm.weight"], h) for h in range(H)])
            o = o * sigmoid(linear(w, "gate_proj", x[i])).reshape(H, K)
        y.append(linear(w, "out_proj", o.reshape(-1)))
    return np.stack(y)


def agree(got, wanted):
    np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        ALIBI,
        {"name": "attention", "alibi": True, "num_heads": 6, "head_dim": 4, "num_kv_heads": 3, "window": 4},
        {"name": "attention", "alibi": True, "rope": True, "num_heads": 2},
        {"name": "fox"},
        {"name": "fox", **GROUPED, "window": 4},
        {"name": "fox", "forget_gate": "bias_only", **GROUPED},
        {"name": "fox", "forget_gate": "fixed", "num_heads": 4, "decay_time_max": 50.0},
        {"name": "fox", "forget_gate": None, "num_heads": 2, "rope": True},
        {"name": "fox_pro"},
        {"name": "fox_pro", **GROUPED, "window": 3, "rope": True, "rotary_dim": 2},
        {"name": "fox_pro", "num_heads": 4, "forget_gate": "bias_only"},
        {"name": "transformer_pro", **GROUPED},
        {"name": "transformer_pro", "num_heads": 2, "window": 4, "rope_base": 100.0},
    ],
    ids=str,
)
def test_formula(options):
    mixer, x = made(**options)
    agree(mixer(x)[0], np.stack([formula(mixer, row) for row in x.numpy()]))


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_slopes_of_alibi(heads):
    slopes = alibi_slopes(heads, torch.float64, torch.device("cpu"))
    np.testing.assert_allclose(slopes.numpy(), slopes_of(heads), rtol=1e-15)


# special gates


def test_a_gate_of_1_is_softmax_attention():
    for rope in (False, True):
        plain, x = made("attention", num_heads=2, rope=rope, rope_base=500000.0)
        open_, none = (
            seqzoo.create_mixer("fox", D, num_heads=2, rope=rope, forget_gate=gate).double()
            for gate in ("full", None)
        )
        none.load_state_dict(plain.state_dict())
        open_.load_state_dict(plain.state_dict(), strict=False)
        set_to(open_, forget_proj__weight=0.0, forget_proj__bias=60.0)
        same(open_, plain, x)
        same(none, plain, x)


def test_fox_pro_without_gate_and_with_positions_is_transformer_pro():
    pro, x = made("transformer_pro", **GROUPED)
    fox = seqzoo.create_mixer("fox_pro", D, **GROUPED, forget_gate=None, rope=True).double()
    fox.load_state_dict(pro.state_dict())
    assert torch.equal(fox(x)[0], pro(x)[0])


def test_a_constant_gate_is_alibi():
    alibi, x = made(**ALIBI)
    fox = seqzoo.create_mixer("fox", D, num_heads=4).double()
    fox.load_state_dict(alibi.state_dict(), strict=False)
    slopes = torch.tensor(slopes_of(4), dtype=torch.float64)
    set_to(fox, forget_proj__weight=0.0, forget_proj__bias=-torch.expm1(slopes).log())
    same(fox, alibi, x)


@pytest.mark.parametrize("name", ["fox", "fox_pro"])
@pytest.mark.parametrize("t", [1, 5])
def test_a_closed_gate_is_attention_restarted(name, t):
    mixer, x = made(name, num_heads=2)
    set_to(mixer, forget_proj__bias=1.0)
    with torch.no_grad():
        mixer.forget_proj.weight[:, 0] = 1e4
        x[..., 0] = 0
        x[:, t, 0] = -1.0
    start = mixer.init_state(2)
    if name == "fox_pro":  # the shift reaches over the gate
        start = start._replace(shift=mixer(x[:, :t])[1].shift)
    y = mixer(x)[0][:, t:]
    torch.testing.assert_close(y, mixer(x[:, t:], start)[0], rtol=1e-12, atol=1e-13)
    agree(y, np.stack([formula(mixer, row, start=t) for row in x.numpy()]))


# caches


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("options", [{"name": name, **GROUPED} for name in NAMES] + [ALIBI], ids=str)
def test_steps_in_place_are_the_whole_pass(options, window):
    mixer, _ = made(**options, window=window)
    x = torch.randn(2, 12, D, dtype=torch.float64)
    whole, last = mixer(x)
    state, out = mixer.init_state(2, capacity=12), []
    places = [t.data_ptr() for t in leaves(state)]
    with torch.no_grad():
        for x_t in x.unbind(1):
            y, state = mixer.step(x_t, state, donate=True)
            out.append(y)
    torch.testing.assert_close(torch.stack(out, 1), whole, rtol=1e-12, atol=1e-13)
    for got, wanted in zip(leaves(state), leaves(last), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    assert [t.data_ptr() for t in leaves(state)] == places
    if window is None:
        with pytest.raises(ValueError, match=r"full.*capacity"):
            mixer.step(x[:, 0], state, donate=True)
        y, _ = mixer.step(x[:, 0], mixer.reserve(state, 1), donate=True)
        torch.testing.assert_close(y, mixer.step(x[:, 0], last)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["fox_pro", "transformer_pro"])
def test_a_prefill_goes_on_with_the_shift(name, window):
    mixer, x = made(name, num_heads=2, window=window)
    whole, last = mixer(x)
    for size in (1, 2, 4, 8):
        state, out = None, []
        for part in x.split(size, 1):
            y, state = mixer(part, state)
            out.append(y)
        torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state.shift, last.shift, rtol=1e-12, atol=0)
    raw = torch.cat([mixer.key_proj(x[:, -1:]), mixer.value_proj(x[:, -1:])], -1)
    torch.testing.assert_close(last.shift.flatten(2), raw, rtol=1e-12, atol=0)
    lost = last._replace(shift=torch.zeros_like(last.shift))
    for length in (1, 5):  # without its vector it is another prefill
        one, two = (mixer(x[:, :length], state)[0] for state in (last, lost))
        assert (one - two).abs().max() > 1e-3
    assert mixer(x[:, :0], last)[1].shift.equal(last.shift)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_lengths(name):
    mixer, x = made(name, **GROUPED)
    lengths = [3, 8]
    prompt, rest = x[:, :8], torch.randn(2, 4, D, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    for given, keep in ((prompt, mask), (prompt.flip(1), mask.flip(1))):  # pads on the right, on the left
        y, state = mixer(given, mask=keep)
        assert not y[~keep].any()
        more, _ = mixer(rest, state)
        in_place = mixer.reserve(state, 4)
        for t in range(4):
            with torch.no_grad():
                y_t, in_place = mixer.step(rest[:, t], in_place, donate=True)
            torch.testing.assert_close(y_t, more[:, t], rtol=1e-12, atol=1e-13)
        for row in range(2):
            alone, _ = mixer(torch.cat([given[row][keep[row]], rest[row]])[None])
            together = torch.cat([y[row][keep[row]], more[row]])
            torch.testing.assert_close(together, alone[0], rtol=1e-12, atol=1e-13)


# how they start, what they weigh, what they refuse


@pytest.mark.parametrize("name", NAMES)
def test_starts_as_published(name):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, 256)
    for module in mixer.modules():
        if isinstance(module, torch.nn.Linear):
            size = module.weight.numel() ** -0.5
            assert module.weight.std().item() == pytest.approx(0.02, abs=0.08 * size)
            assert abs(module.weight.mean().item()) < 0.08 * size
    if name != "transformer_pro":
        assert not mixer.forget_proj.bias.any()
        gate = mixer.log_decay(torch.randn(2, 100, 256)).exp()
        assert gate.mean().item() == pytest.approx(0.5, abs=0.02)
    if name != "fox":
        assert all((norm.weight == 1).all() for norm in (mixer.query_norm, mixer.key_norm, mixer.norm))


def test_decay_times_are_evenly_spaced_in_their_logarithm():
    x = torch.randn(1, 2, D)
    times = torch.tensor([4.0, 16.0, 64.0, 256.0])
    for gate in ("bias_only", "fixed"):
        options = {"num_heads": 4, "decay_time_min": 4.0, "decay_time_max": 256.0}
        mixer = seqzoo.create_mixer("fox", D, forget_gate=gate, **options)
        torch.testing.assert_close(mixer.log_decay(x), (-1 / times).expand(1, 2, 4))
        learnt = [n for n, _ in mixer.named_parameters() if "forget" in n]
        assert learnt == (["forget_bias"] if gate == "bias_only" else [])


def test_weights_of_the_table():
    for heads in (4, 8):
        fox, pro, transformer = (seqzoo.create_mixer(name, 64, num_heads=heads) for name in NAMES)
        assert count(fox) == 4 * 64**2 + 64 * heads + heads
        assert count(pro) == 5 * 64**2 + 3 * 64 * heads + heads + 3 * 64
        assert count(transformer) == 5 * 64**2 + 2 * 64 * heads + 3 * 64
    grouped = seqzoo.create_mixer("fox_pro", 64, **GROUPED)
    assert count(grouped) == 4 * 64**2 + (4 + 2 * 2) * 64 + 4 + (64 + 64 + 32)
    without = {name for name, p in grouped.named_parameters() if not grouped.param_rule(name, p).decay}
    assert without == {"forget_proj.bias", "query_norm.weight", "key_norm.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fox", {"head_dim": 5, "rope": True}, r"fox: .*even rotary_dim.*5"),
        ("fox_pro", {"head_dim": 5, "rope": True}, r"fox_pro: .*even rotary_dim.*5"),
        ("transformer_pro", {"head_dim": 5}, r"transformer_pro: .*even rotary_dim.*5"),
        ("fox", {"num_heads": 3}, r"fox: .*num_heads.*16.*3"),
        ("fox", {"window": 0}, r"fox: .*window.*0"),
        ("fox", {"forget_gate": "ful"}, r"fox: .*forget_gate.*'full'.*'ful'"),
        ("fox_pro", {"decay_time_min": 0.0}, r"fox_pro: .*decay_time_min.*0.0"),
        ("fox_pro", {"decay_time_min": 9.0, "decay_time_max": 8.0}, r"fox_pro: .*9.0 and 8.0"),
    ],
)
def test_says_what_is_wrong(name, options, text):
    with pytest.raises(ValueError, match=text):
        seqzoo.create_mixer(name, D, **options)


@pytest.mark.parametrize(
    "options", [{"name": "fox"}, {"name": "fox_pro"}, {"name": "attention", "alibi": True}]
)
def test_an_odd_head_needs_no_positions(options):
    assert seqzoo.create_mixer(dim=D, head_dim=5, **options)(torch.randn(1, 3, D))[0].shape == (1, 3, D)
