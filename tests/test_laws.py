"""Every registered mixer obeys every law; mixers with a planted fault are caught, each by the law it breaks."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, example, given, settings
from torch import Tensor

import seqzoo
from seqzoo.testing import LAWS, LawViolation
from seqzoo.testing.examples import CHUNK, DTYPES, EXAMPLES
from seqzoo_kernels import linear_scan

DIM = 16
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


def each_example(law):
    """Run a test on the law's examples: those that no run leaves out, and a few drawn ones."""

    def decorate(test):
        test = given(case=EXAMPLES[law].drawn)(test)
        for case in reversed(EXAMPLES[law].always):
            test = example(case=case)(test)
        return few(test)

    return decorate


def each_always(law):
    """Parametrise a test by the law's examples that no run leaves out."""
    return pytest.mark.parametrize(
        "case", EXAMPLES[law].always, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items())
    )


@each_mixer(modes=True, step=True)
@each_example("modes_agree")
def test_modes_agree(make, dtype, mode, case):
    LAWS["modes_agree"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("splitting")
def test_splitting(make, dtype, mode, case):
    LAWS["splitting"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("causality")
def test_causality(make, dtype, mode, case):
    LAWS["causality"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("packing")
def test_packing(make, dtype, mode, case):
    LAWS["packing"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("padding")
def test_padding(make, dtype, mode, case):
    LAWS["padding"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("rows")
def test_rows(make, dtype, mode, case):
    LAWS["rows"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_example("state_value")
def test_state_value(make, dtype, mode, case):
    LAWS["state_value"](make, mode=mode, dtype=dtype, **case)


@each_mixer(dtypes=EXAMPLES["precision"].dtypes, modes=True)
@each_always("precision")
def test_precision(make, dtype, mode, case):
    LAWS["precision"](make, mode=mode, dtype=dtype, **case)


@each_mixer(modes=True)
@each_always("extremes")
def test_extremes(make, dtype, mode, case):
    LAWS["extremes"](make, mode=mode, dtype=dtype, **case)


@each_mixer(dtypes=EXAMPLES["round_trips"].dtypes)
@each_always("round_trips")
def test_round_trips(make, dtype, case):
    if case["way"] == "safetensors":
        pytest.importorskip("safetensors")
    LAWS["round_trips"](make, dtype=dtype, **case)


@each_mixer(dtypes=EXAMPLES["compiles"].dtypes, variants=False)
@each_always("compiles")
def test_compiles(make, dtype, case):
    LAWS["compiles"](make, dtype=dtype, **case)


@each_mixer()
def test_errors(make, dtype):
    LAWS["errors"](make, dtype=dtype)


class TestAThousandTokens:
    """The fixed case: T = 1,000."""

    @each_mixer(modes=True, variants=False)
    def test_modes_agree(self, make, dtype, mode):
        for case in EXAMPLES["modes_agree"].long:
            LAWS["modes_agree"](make, mode=mode, dtype=dtype, **case)

    @each_mixer(variants=False)
    @pytest.mark.parametrize("law", ["splitting", "packing", "padding", "rows"])
    def test_mode_auto(self, make, dtype, law):
        for case in EXAMPLES[law].long:
            LAWS[law](make, dtype=dtype, **case)


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
