"""Every registered mixer obeys every law; mixers with a planted fault are caught, each by the law it breaks."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, example, given, settings
from torch import Tensor

import seqzoo
from seqzoo.testing import LAWS, LawViolation, strategies
from seqzoo.testing.laws_of_use import ROUND_TRIPS
from seqzoo_kernels import linear_scan

DIM = 16
CHUNK = strategies.CHUNK
DTYPES = (torch.float64, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
# Options that change the state, or the recurrence.
VARIANTS = {
    "attention": [{"window": 4, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True}],
    "hgru_real": [{"conv_size": 4, "expand": 2}, {"conv_size": 1, "norm_position": "post_gate"}],
    "gla": [{"num_heads": 4, "num_kv_heads": 2}],
}

few = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def maker(name, **options):
    """Builds the mixer, with chunks of CHUNK where it has that option, so that short inputs meet the edges of chunks."""
    if "chunk_size" in seqzoo.mixer_info(name).options:
        options.setdefault("chunk_size", CHUNK)
    return partial(seqzoo.create_mixer, name, DIM, **options)


def mixers(variants=True):
    """(id, maker, modes) of every mixer, and of its variants."""
    for name in seqzoo.list_mixers():
        for options in [{}, *VARIANTS.get(name, [])] if variants else [{}]:
            yield "-".join([name, *options]), maker(name, **options), seqzoo.mixer_info(name).modes


def each_mixer(*, dtypes=DTYPES, modes=False, step=False, variants=True):
    """Parametrise a test by `make`, `dtype` and, if asked, `mode`."""
    cases = []
    for name, make, its_modes in mixers(variants):
        for dtype in dtypes:
            kind = str(dtype).removeprefix("torch.")
            for mode in (*its_modes, *["step"] * step) if modes else [None]:
                values = (make, dtype, mode) if modes else (make, dtype)
                cases.append(pytest.param(*values, id="-".join([name, kind, *[mode] * modes])))
    return pytest.mark.parametrize(("make", "dtype", "mode") if modes else ("make", "dtype"), cases)


@each_mixer(modes=True, step=True)
@few
@given(batch=strategies.batches(), length=strategies.lengths(), drawn=strategies.drawn())
@example(batch=2, length=CHUNK - 1, drawn={"shared": True})
@example(batch=2, length=2 * CHUNK + 1, drawn={"history": 0})
@example(batch=1, length=1, drawn={})
def test_modes_agree(make, dtype, mode, batch, length, drawn):
    LAWS["modes_agree"](make, mode=mode, batch=batch, length=length, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(length_and_cuts=strategies.lengths_and_cuts(), drawn=strategies.drawn())
@example(length_and_cuts=(70, (1, 3, 68)), drawn={"history": 0})
@example(length_and_cuts=(CHUNK + 1, (CHUNK,)), drawn={"shared": True})
@example(length_and_cuts=(6, (0, 6)), drawn={})
def test_splitting(make, dtype, mode, length_and_cuts, drawn):
    length, cuts = length_and_cuts
    LAWS["splitting"](make, cuts=cuts, mode=mode, length=length, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(length_and_cut=strategies.lengths_and_cut(), drawn=strategies.drawn())
@example(length_and_cut=(2 * CHUNK + 1, CHUNK - 1), drawn={})
@example(length_and_cut=(2 * CHUNK + 1, CHUNK - 1), drawn={"history": 0})
def test_causality(make, dtype, mode, length_and_cut, drawn):
    length, cut = length_and_cut
    LAWS["causality"](make, cut=cut, mode=mode, length=length, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(
    lengths=strategies.packs(),
    tail=strategies.tails(),
    bounded=strategies.booleans(),
    drawn=strategies.drawn(),
)
@example(lengths=(10, 5, 22), tail=0, bounded=False, drawn={"history": 0})
@example(lengths=(0, CHUNK, 0, 1, CHUNK + 1, 0), tail=2, bounded=True, drawn={"shared": True})
@example(lengths=(0, 0), tail=3, bounded=True, drawn={})
def test_packing(make, dtype, mode, lengths, tail, bounded, drawn):
    LAWS["packing"](make, lengths=lengths, tail=tail, bounded=bounded, mode=mode, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(mask=strategies.masks(), drawn=strategies.drawn())
@example(mask=("111111110000", "111100111000"), drawn={"history": 0})
@example(mask=("0" * 7 + "1" * 17, "1" * 24, "0" * 24), drawn={"shared": True})
def test_padding(make, dtype, mode, mask, drawn):
    LAWS["padding"](make, mask=mask, mode=mode, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(index=strategies.indices(), length=strategies.lengths(), drawn=strategies.drawn())
@example(index=(2, 0, 0), length=CHUNK + 1, drawn={})
def test_rows(make, dtype, mode, index, length, drawn):
    LAWS["rows"](make, index=index, mode=mode, batch=3, length=length, dtype=dtype, **drawn)


@each_mixer(modes=True)
@few
@given(length=strategies.lengths(40), drawn=strategies.drawn())
@example(length=1, drawn={})
@example(length=CHUNK + 1, drawn={"shared": True})
def test_state_value(make, dtype, mode, length, drawn):
    LAWS["state_value"](make, mode=mode, length=length, dtype=dtype, **drawn)


@each_mixer(dtypes=(*DTYPES, *HALVES), modes=True)
@pytest.mark.parametrize("history", [0, 5])
def test_precision(make, dtype, mode, history):
    LAWS["precision"](make, mode=mode, length=67, dtype=dtype, history=history)


@each_mixer(modes=True)
@pytest.mark.parametrize(("batch", "length", "scale"), [(2, 33, 30.0), (2, 0, 1.0), (0, 5, 1.0), (0, 0, 1.0)])
@pytest.mark.parametrize("history", [0, 5])
def test_extremes(make, dtype, mode, batch, length, scale, history):
    LAWS["extremes"](make, mode=mode, batch=batch, length=length, scale=scale, dtype=dtype, history=history)


@each_mixer(dtypes=(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_round_trips(make, dtype, way):
    if way == "safetensors":
        pytest.importorskip("safetensors")
    LAWS["round_trips"](make, way=way, dtype=dtype)


@each_mixer(dtypes=[torch.float32], variants=False)
@pytest.mark.parametrize(
    ("first", "later", "options"),
    [
        pytest.param(3, (50, 33), {}, id="first=3"),
        pytest.param(33, (4, 50), {"given": "cu_seqlens", "shared": True}, id="first=33-cu_seqlens"),
        pytest.param(50, (33, 3), {"given": "mask"}, id="first=50-mask"),
        pytest.param(1, (), {"mode": "recurrent"}, id="one-step"),
        pytest.param(33, (3, 50), {"backend": "export"}, id="export"),
    ],
)
def test_compiles(make, dtype, first, later, options):
    # An option such as norm_eps is traced as a symbol, found to be a constant, and everything is traced again: skip that.
    with torch._dynamo.config.patch(specialize_float=True):
        LAWS["compiles"](make, first=first, later=later, dtype=dtype, **options)


@each_mixer()
def test_errors(make, dtype):
    LAWS["errors"](make, dtype=dtype)


class TestAThousandTokens:
    """The fixed case: T = 1,000."""

    T = 1000

    @each_mixer(modes=True, variants=False)
    def test_modes_agree(self, make, dtype, mode):
        LAWS["modes_agree"](make, mode=mode, length=self.T, dtype=dtype)

    @each_mixer(variants=False)
    def test_cut(self, make, dtype):
        LAWS["splitting"](make, cuts=(37, 38, 500), length=self.T, dtype=dtype)

    @each_mixer(variants=False)
    def test_packed(self, make, dtype):
        LAWS["packing"](make, lengths=(0, 13, 487, 500), dtype=dtype)

    @each_mixer(variants=False)
    def test_padded(self, make, dtype):
        left, right = "0" * 500 + "1" * 500, "1" * 500 + "0" * 500
        middle, nothing = "1" * 250 + "0" * 500 + "1" * 250, "0" * 1000
        LAWS["padding"](make, mask=(left, right, middle, nothing), dtype=dtype)

    @each_mixer(variants=False)
    def test_state_in_another_order(self, make, dtype):
        LAWS["rows"](make, index=(2, 0, 1, 0), batch=3, length=self.T, dtype=dtype)


class EMAState(NamedTuple):
    h: Tensor


class EMA(seqzoo.TokenMixer):
    """A right mixer, h_t = a h_{t-1} + (1 - a) x_t, to plant faults in."""

    modes = ("parallel", "chunked", "recurrent")

    def __init__(self, dim: int, *, half_life: float = 8.0) -> None:
        super().__init__(dim)
        self.log_rate = torch.nn.Parameter(torch.log(torch.linspace(0.1, 1.0, dim) / half_life))
        self.out_proj = torch.nn.Linear(dim, dim, bias=False)

    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        h, final = self.scan(x, state.h, pack, mode)
        return self.out_proj(h.to(x.dtype)), EMAState(final)

    def scan(self, x, h, pack, mode):
        log_decay = -self.log_rate.to(h.dtype).exp()
        x = -torch.expm1(log_decay) * x
        return linear_scan(log_decay, x, initial_state=h, cu_seqlens=pack.cu_seqlens, mode=mode)


class IgnoresStateWhenManyTokens(EMA):
    def scan(self, x, h, pack, mode):
        return super().scan(x, h if x.shape[1] == 1 else torch.zeros_like(h), pack, mode)


class LooksOneStepAhead(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y + 0.1 * torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)[:, : x.shape[1]], state


class PadsDecayTheState(EMA):
    def forward(self, x, state=None, *, mask=None, **options):
        if mask is None:
            return super().forward(x, state, **options)
        y, state = super().forward(torch.where(mask[..., None], x, 0), state, **options)
        return torch.where(mask[..., None], y, 0), state


class ReadsPads(EMA):
    def forward(self, x, state=None, *, mask=None, **options):
        y, state = super().forward(x, state, mask=mask, **options)
        return y if mask is None else y + 1e-3 * x * ~mask[..., None], state


class KeepsStateInBfloat16(EMA):
    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim).to(self.log_rate.dtype))

    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, EMAState(state.h.float()), pack=pack, mode=mode, shared=shared)
        return y, EMAState(state.h.to(x.dtype))


class DropsTheInitialStatesGradient(EMA):
    def scan(self, x, h, pack, mode):
        return super().scan(x, h.detach(), pack, mode)


class DropsTheFinalStatesGradient(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y, EMAState(state.h.detach())


class WritesIntoTheGivenState(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, final = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        with torch.no_grad():
            state.h.data.copy_(final.h)
        return y, EMAState(final.h.clone())


class KeepsTheStateOnTheModule(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        self.seen = getattr(self, "seen", 0) + x.shape[1]
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y * (1 + 0.01 * self.seen), state


class StateKeepsMoreAlive(EMA):
    def forward(self, x, state=None, **options):
        y, state = super().forward(x, state, **options)
        return y, EMAState(torch.cat([state.h, state.h], 1)[:, : self.dim])


class WrongAtTheEdgeOfAChunk(EMA):
    def scan(self, x, h, pack, mode):
        h, final = super().scan(x, h, pack, mode)
        return (h, 1.01 * final) if mode == "chunked" and x.shape[1] == CHUNK + 1 else (h, final)


class MixesRows(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        mean = x.mean(0, keepdim=True) if pack.cu_seqlens is None and len(x) else 0
        return super().mix(x - 0.1 * mean, state, pack=pack, mode=mode, shared=shared)


class IsNaNWithoutTokens(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, final = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y, EMAState(final.h + 0 * x.mean())


class HasAnUnsavedBuffer(EMA):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("table", torch.randn(dim), persistent=False)

    def mix(self, x, state, *, pack, mode, shared):
        return super().mix(x * self.table, state, pack=pack, mode=mode, shared=shared)


class BreaksTheGraph(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        if x.abs().max().item() > 1e30:
            raise ValueError("too large")
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class SwallowsKeywords(EMA):
    def forward(self, x, state=None, **options):
        options.pop("cu_seqlen", None)
        return super().forward(x, state, **options)


RIGHT = {
    "modes_agree": [{"mode": "chunked", "length": CHUNK + 1}, {"mode": "step"}],
    "splitting": [{"cuts": (3, 9)}],
    "causality": [{"cut": 9}],
    "packing": [{"lengths": (5, 0, 9), "tail": 2}],
    "padding": [{"mask": ("0011", "1101", "1100", "0000")}],
    "rows": [{"index": (2, 0, 0), "batch": 3}],
    "state_value": [{}],
    "precision": [{"dtype": torch.bfloat16, "length": 65}],
    "extremes": [{"length": 0}, {"scale": 30.0}],
    "round_trips": [
        {"way": way} for way in ("config", "state_dict", "deepcopy", "meta", "torch.save", "state")
    ],
    "compiles": [{"first": 3, "later": (33, 50)}],
    "errors": [{}],
}
FAULTS = {
    IgnoresStateWhenManyTokens: "splitting",
    LooksOneStepAhead: "causality",
    PadsDecayTheState: "padding",
    ReadsPads: "padding",
    KeepsStateInBfloat16: "precision",
    DropsTheInitialStatesGradient: "splitting",
    DropsTheFinalStatesGradient: "splitting",
    WritesIntoTheGivenState: "state_value",
    KeepsTheStateOnTheModule: "state_value",
    StateKeepsMoreAlive: "state_value",
    WrongAtTheEdgeOfAChunk: "modes_agree",
    MixesRows: "rows",
    IsNaNWithoutTokens: "extremes",
    HasAnUnsavedBuffer: "round_trips",
    BreaksTheGraph: "compiles",
    SwallowsKeywords: "errors",
}


def obeys(law, make):
    for case in RIGHT[law]:
        LAWS[law](make, **case)


def test_the_laws_are_the_twelve_in_order():
    assert list(LAWS) == list(RIGHT)


@pytest.mark.parametrize("law", LAWS)
def test_a_right_mixer_is_not_accused(law):
    obeys(law, partial(EMA, DIM))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_the_law_it_breaks(fault):
    law = FAULTS[fault]
    with pytest.raises(LawViolation, match=f"^{law}: "):
        obeys(law, partial(fault, DIM))


def test_a_violation_says_which_law_what_example_and_by_how_much():
    with pytest.raises(
        LawViolation, match=r"splitting: .*state\.h.*\n.*wherever the cuts are.*\n.*cuts=\(3,\)"
    ) as caught:
        LAWS["splitting"](partial(IgnoresStateWhenManyTokens, DIM), cuts=(3,), length=7, seed=5)
    violation = caught.value
    assert violation.law == "splitting"
    assert violation.example == {"cuts": (3,), "mode": "auto", "length": 7, "seed": 5}
    assert violation.measured > 1e3 * violation.allowed > 0
    with pytest.raises(LawViolation):
        LAWS[violation.law](partial(IgnoresStateWhenManyTokens, DIM), **violation.example)


def test_a_crash_on_a_legal_call_is_a_violation():
    def broken():
        raise KeyError("no weights")

    with pytest.raises(LawViolation, match=r"rows: KeyError: 'no weights'"):
        LAWS["rows"](broken, index=(0,))


def test_a_misspelt_example_is_not_a_violation():
    with pytest.raises(TypeError, match="mask"):
        LAWS["padding"](partial(EMA, DIM), masks=("11",))
