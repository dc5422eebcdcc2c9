"""What the laws are tried on: strategies draw legal examples of every kind, and layouts change no number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqzoo
from seqzoo.testing import poisoned_memory, strategies
from seqzoo.testing.cases import draw
from seqzoo.testing.layouts import placed, strided
from seqzoo.testing.routes import whole
from seqzoo.testing.subject import DIM


def kinds(strategy, count=200):
    """Many examples of a strategy."""
    seen = []

    @settings(max_examples=count, database=None, derandomize=True, deadline=None)
    @given(strategy)
    def look(example):
        seen.append(example)

    look()
    return seen


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_options_come_from_the_signature_and_build(name):
    drawn = kinds(strategies.options(name), 60)
    known = seqzoo.mixer_info(name).options
    assert all(options.keys() <= known.keys() and len(options) <= 2 for options in drawn)
    assert len({tuple(sorted(options.items())) for options in drawn}) > 5
    for options in drawn:
        seqzoo.create_mixer(name, DIM, **options)


def test_options_leave_the_fixed_ones_alone():
    assert not any("num_heads" in options for options in kinds(strategies.options("gla", {"num_heads": 2})))


def test_mixers_are_the_registered_ones():
    assert set(kinds(strategies.mixers())) == set(seqzoo.list_mixers())
    assert set(kinds(strategies.mixers("hgr*"))) == set(seqzoo.list_mixers("hgr*"))


def test_masks_are_of_every_kind():
    rows = [row for mask in kinds(strategies.masks()) for row in mask if len(row) > 3]
    assert any(set(row) == {"0"} for row in rows)
    assert any(set(row) == {"1"} for row in rows)
    assert any(row.startswith("0") and row.endswith("1") and "10" not in row for row in rows)
    assert any(row.startswith("1") and row.endswith("0") and "01" not in row for row in rows)
    assert any(row.startswith("1") and row.endswith("1") and "0" in row for row in rows)


def test_packs_have_empty_sequences_and_may_be_empty():
    packs = kinds(strategies.packs())
    assert () in packs
    assert any(0 in pack and any(pack) for pack in packs)


def test_memory_is_of_every_kind():
    drawn = {(m["layout"], m["gradients"], m["poisoned"]) for m in kinds(strategies.memory())}
    assert len(drawn) == 2 * 3 * 2


def test_gates_are_of_every_kind():
    assert {"saturated", "closed", "huge", "tiny", "alternating"} <= set(kinds(strategies.gates()))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (0, 3, 4)])
def test_strided_changes_no_number(shape):
    x = torch.randn(shape, requires_grad=True)
    y = strided(x)
    assert torch.equal(x, y)
    assert not y.is_contiguous() or not y.numel()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, torch.ones_like(x))


class Seen(torch.autograd.Function):
    """The identity, which notes the strides of what comes in and of what comes back."""

    strides: dict[str, tuple[int, ...]] = {}

    @staticmethod
    def forward(ctx, x):
        Seen.strides["x"] = x.stride()
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        Seen.strides["gradient"] = gradient.stride()
        return gradient


@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("gradients", ["dense", "strided", "expanded"])
def test_a_placed_route_is_given_what_it_says(layout, gradients):
    case = draw(lambda: seqzoo.create_mixer("lru", DIM), length=5)

    def route(mixer, x, state, shared):
        return Seen.apply(x), state

    case.measure(placed(route, layout, gradients))
    dense = (5 * DIM, DIM, 1)
    assert (Seen.strides["x"] == dense) == (layout == "dense")
    assert (Seen.strides["gradient"] == dense) == (gradients == "dense")
    assert (Seen.strides["gradient"][:2] == (0, 0)) == (gradients == "expanded")


def test_a_placed_route_gives_the_same():
    case = draw(lambda: seqzoo.create_mixer("lru", DIM), length=5)
    plain = case.measure(whole)
    for name, value in case.measure(placed(whole, "strided", "strided")).items():
        torch.testing.assert_close(value, plain[name])
    with pytest.raises(ValueError, match="layout"):
        placed(whole, "stridden")


def test_poisoned_memory_ends():
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    with poisoned_memory(False):
        assert not torch.are_deterministic_algorithms_enabled()


@given(st.data())
@settings(max_examples=20, database=None, derandomize=True, deadline=None)
def test_a_joined_strategy_has_all_names(data):
    drawn = data.draw(strategies.joined(strategies.drawn(), strategies.memory()))
    assert drawn.keys() == {"seed", "shared", "history", "layout", "gradients", "poisoned"}
