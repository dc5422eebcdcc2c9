"""Both ways through a sequence, four ways through an image."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import seqzoo
from seqzoo import Bidirectional, Block, Scan2d

DIM = 16
each_mixer = pytest.mark.parametrize("name", seqzoo.list_mixers())


def make(name, seed=0):
    torch.manual_seed(seed)
    return seqzoo.create_mixer(name, DIM).double()


def tokens(*shape, seed=1):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@each_mixer
def test_it_is_the_sum_of_two_readings(name):
    ahead, back, x = make(name), make(name, 5), tokens(2, 11)
    y, state = Bidirectional(ahead, back)(x)
    assert state is None
    close(y, ahead(x)[0] + back(x.flip(1))[0].flip(1))


@each_mixer
def test_every_position_sees_all(name):
    x = tokens(1, 6).requires_grad_()
    both = Bidirectional(make(name))
    for t in (0, 5):
        (grad,) = torch.autograd.grad(both(x)[0][0, t].sum(), x)
        assert (grad[0].abs().sum(-1) > 0).all()


@given(lengths=st.lists(st.integers(0, 7), max_size=4), tail=st.integers(0, 3), bounded=st.booleans())
@pytest.mark.parametrize("name", ["hgru", "attention"])
def test_a_pack_is_its_sequences(name, lengths, tail, bounded):
    both, x = Bidirectional(make(name), make(name, 5)), tokens(1, sum(lengths) + tail)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    y, _ = both(x, cu_seqlens=ends, max_seqlen=max(lengths, default=0) if bounded else None)
    alone = [both(part)[0] for part in x[:, : sum(lengths)].split(lengths, 1)] if lengths else []
    close(y, torch.cat([*alone, torch.zeros_like(x[:, sum(lengths) :])], 1))


@given(rows=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["hgru", "attention"])
def test_pads_change_nothing(name, rows):
    both, mask = Bidirectional(make(name), make(name, 5)), torch.tensor(rows)
    x = tokens(*mask.shape).masked_fill(~mask[..., None], torch.nan)
    y, _ = both(x, mask=mask)
    for row, here, got in zip(x, mask, y, strict=True):
        close(got[here], both(row[here][None])[0][0])
        assert not got[~here].any()


def test_what_a_stack_hands_down_reaches_both():
    both, x, bound = Bidirectional(make("hgru_real")), tokens(1, 5), torch.full((DIM,), 0.9).double()
    y, _ = both(x, shared={"lower_bound": bound})
    mixer = both.mixer
    close(
        y,
        mixer(x, shared={"lower_bound": bound})[0]
        + mixer(x.flip(1), shared={"lower_bound": bound})[0].flip(1),
    )


def test_in_a_block_and_compiled():
    block = Block(Bidirectional(make("hgrn2")), 32).double()
    x = tokens(2, 9)
    close(torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")(x)[0], block(x)[0])


@pytest.mark.parametrize("wrap", [Bidirectional, Scan2d])
def test_shared_weights_are_there_once(wrap, tmp_path):
    whole = wrap(make("lru"))
    assert len(whole.state_dict()) == len(list(make("lru").parameters()))
    save_file(whole.state_dict(), tmp_path / "weights.safetensors")  # which refuses memory under two names
    other = wrap(make("lru", seed=7))
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x = tokens(1, 3, 4) if wrap is Scan2d else tokens(1, 6)
    read = [part if wrap is Scan2d else part[0] for part in (whole(x), other(x))]
    assert torch.equal(*read)


@pytest.mark.parametrize("wrap", [Bidirectional, lambda a, b: Scan2d([a, b, make("lru", 2), make("lru", 3)])])
def test_separate_weights_train_by_the_rules_of_their_mixers(wrap):
    whole = wrap(make("lru"), make("lru", 1))
    names = {p: name for name, p in whole.named_parameters()}
    groups = seqzoo.param_groups(whole, lr=1.0, weight_decay=0.1)
    slow = {names[p] for group in groups if group["lr"] == 0.5 for p in group["params"]}
    assert len(slow) == 5 * len({name.rsplit(".", 1)[0] for name in names.values()})
    assert sum(len(group["params"]) for group in groups) == len(names)


@each_mixer
def test_four_ways_through_an_image(name):
    mixers, x = [make(name, seed) for seed in range(4)], tokens(2, 3, 5)
    rows, columns = x.flatten(1, 2), x.transpose(1, 2).flatten(1, 2)
    wanted = mixers[0](rows)[0].unflatten(1, (3, 5))
    wanted = wanted + mixers[1](columns)[0].unflatten(1, (5, 3)).transpose(1, 2)
    wanted = wanted + mixers[2](rows.flip(1))[0].flip(1).unflatten(1, (3, 5))
    wanted = wanted + mixers[3](columns.flip(1))[0].flip(1).unflatten(1, (5, 3)).transpose(1, 2)
    close(Scan2d(mixers)(x), wanted)


def test_shared_weights_know_no_half_turn_and_no_transpose():
    scan, x = Scan2d(make("hgru")), tokens(1, 4, 4)
    close(scan(x.rot90(2, (1, 2))), scan(x).rot90(2, (1, 2)))
    close(scan(x.transpose(1, 2)), scan(x).transpose(1, 2))


def test_every_place_sees_all_and_none_in_the_mask():
    x, mask = tokens(1, 3, 4), torch.ones(1, 3, 4, dtype=torch.bool)
    mask[0, 1, 2] = mask[0, 0, 0] = False
    scan = Scan2d(make("hgrn2"))
    leaf = x.clone().requires_grad_()
    y = scan(leaf, mask=mask)
    (grad,) = torch.autograd.grad(y[0, 2, 1].sum(), leaf)
    assert torch.equal(grad[0].abs().sum(-1) > 0, mask[0])
    assert not y[~mask].any()
    assert torch.equal(scan(x.masked_fill(~mask[..., None], torch.nan), mask=mask), y)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Bidirectional(nn.Linear(16, 16)), TypeError, "Linear"),
        (lambda: Bidirectional(make("lru"), seqzoo.create_mixer("lru", 32)), ValueError, r"\[16, 32\]"),
        (lambda: Scan2d([make("lru")] * 3), ValueError, "one mixer or four, got 3"),
        (lambda: Bidirectional(make("lru"))(tokens(1, 3), make("lru").init_state(1)), ValueError, "state"),
        (lambda: Bidirectional(make("lru"))(tokens(1, 3), msk=None), TypeError, "mean 'mask'"),
        (lambda: Scan2d(make("lru"))(tokens(1, 3)), ValueError, r"\(B, H, W, D\)"),
        (
            lambda: Scan2d(make("lru"))(tokens(1, 3, 2), mask=torch.ones(1, 2, 3) > 0),
            ValueError,
            r"\(1, 3, 2\)",
        ),
    ],
)
def test_errors(build, error, words):
    with pytest.raises(error, match=words):
        build()
