"""Every registered mixer obeys every law, and a broken law says what broke."""

from functools import partial

import pytest
import torch
from hypothesis import Phase, example, given, settings
from planted import IgnoresStateWhenManyTokens
from right_mixers import EMA

import seqzoo
from seqzoo.testing import LAWS, LawViolation
from seqzoo.testing.examples import CHUNK, DTYPES, EXAMPLES
from seqzoo.testing.subject import DIM

# Options that change the state, or the recurrence.
VARIANTS = {
    "attention": [{"window": 4, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True}],
    "fox_pro": [{"window": 4, "num_heads": 2, "num_kv_heads": 1, "rope": True}],
    "hgru_real": [{"conv_size": 4, "expand": 2}, {"conv_size": 1, "norm_position": "post_gate"}],
    "gla": [{"num_heads": 4, "num_kv_heads": 2}],
    "lstm": [{"variant": "FGR"}],
}
# Those whose difference is arithmetic alone: in float64 only, for the time it takes. The kit draws options in every dtype.
VARIANTS_IN_FLOAT64 = {
    "attention": [{"alibi": True, "rope": False, "num_heads": 2}],
    "fox": [{"forget_gate": "bias_only", "num_heads": 2}, {"forget_gate": "fixed"}, {"forget_gate": None}],
    "hgru": [
        {"forget_gate": False, "gate_rank": 4},
        {"lower_bound": None},
        {"lower_bound": None, "forget_gate": False},
    ],
    "hgru_real": [{"forget_gate": False}, {"lower_bound": None, "forget_gate": False}],
    "hgrn2": [{"conv_size": 4, "lower_bound": None}],
    "gla": [{"conv_size": 4, "feature_map": "elu", "normalize": True, "log_decay_min": -1.0}],
    "lru_forget": [{"gamma": "dynamic", "gate_bias": -4.0}],
    "lstm": [{"variant": "CIFG", "expand": 2}, {"variant": "NOG"}, {"variant": "NOAF"}],
    "gru": [{"expand": 2}],
    "linear_attention": [
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu"},
        {"normalize": False, "feature_map": None, "norm": "rms"},
    ],
    "min_gru": [{"candidate_act": None, "expand": 1.5}],
    "min_lstm": [{"normalize": False, "out_proj": False}],
    "rg_lru": [{"num_heads": 4, "conv_size": 0, "scale_first": True}],
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
    """(id, maker, modes, whether in float64 only) of every mixer, and of its variants."""
    for name in seqzoo.list_mixers():
        kinds = [({}, False)]
        if variants:
            kinds += [(options, False) for options in VARIANTS.get(name, [])]
            kinds += [(options, True) for options in VARIANTS_IN_FLOAT64.get(name, [])]
        for options, wide_only in kinds:
            yield "-".join([name, *options]), maker(name, **options), seqzoo.mixer_info(name).modes, wide_only


def each_mixer(*, dtypes=DTYPES, modes=False, step=False, variants=True):
    """Parametrise a test by `make`, `dtype` and, if asked, `mode`."""
    cases = []
    for name, make, its_modes, wide_only in mixers(variants):
        for dtype in dtypes if not wide_only else [d for d in dtypes if d == torch.float64]:
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


def test_a_window_is_exported_for_any_length():
    LAWS["compiles"](maker("attention", window=4), first=33, later=(3, 50), backend="export")


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


def obeys(law, make):
    for case in RIGHT[law]:
        LAWS[law](make, **case)


def test_the_laws_are_the_twelve_in_order():
    assert list(LAWS) == list(RIGHT)


@pytest.mark.parametrize("law", LAWS)
def test_a_right_mixer_is_not_accused(law):
    obeys(law, partial(EMA, DIM))


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
