"""States: what `seqzoo.states` does to the state of every mixer."""

import pytest
import torch

import seqzoo
from seqzoo import states
from seqzoo.testing.comparing import named_leaves

DIM = 16
each_mixer = pytest.mark.parametrize("name", seqzoo.list_mixers())


def state_of(name, batch=3, length=7):
    """A mixer and a state that has seen tokens."""
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, DIM)
    return mixer, mixer(torch.randn(batch, length, DIM))[1]


@each_mixer
def test_a_state_is_a_named_tuple_of_tensors_batch_first(name):
    mixer, state = state_of(name)
    empty = mixer.init_state(3)
    assert type(state) is type(empty)
    assert isinstance(state, tuple)
    assert state._fields
    assert named_leaves(state).keys() == named_leaves(empty).keys()
    for leaf in named_leaves(state).values():
        assert leaf.shape[0] == 3


@each_mixer
def test_no_state_is_the_initial_state(name):
    mixer, _ = state_of(name)
    x = torch.randn(3, 7, DIM)
    y, state = mixer(x)
    y_given, state_given = mixer(x, mixer.init_state(3))
    assert torch.equal(y, y_given)
    assert all(
        torch.equal(a, b)
        for a, b in zip(named_leaves(state).values(), named_leaves(state_given).values(), strict=True)
    )


@each_mixer
def test_init_state_follows_the_weights(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mixer = seqzoo.create_mixer(name, DIM).to(dtype)
        _, state = mixer(torch.randn(2, 5, DIM, dtype=dtype))
        for field, leaf in named_leaves(mixer.init_state(2)).items():
            assert leaf.dtype == named_leaves(state)[field].dtype, field
            assert leaf.dtype != torch.float32 or dtype != torch.float64, field
    for field, leaf in named_leaves(seqzoo.create_mixer(name, DIM).to("meta").init_state(2)).items():
        assert leaf.device.type == "meta", field


@each_mixer
@pytest.mark.parametrize("index", [[2, 0], [0, 1, 2], [1, 1, 1, 0], []])
def test_select(name, index):
    _, state = state_of(name)
    picked = states.select(state, torch.tensor(index, dtype=torch.int64))
    assert type(picked) is type(state)
    for field, leaf in named_leaves(picked).items():
        assert torch.equal(leaf, named_leaves(state)[field][index]), field


@each_mixer
@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 0]])
def test_reorder(name, index):
    _, state = state_of(name)
    moved = states.reorder(state, torch.tensor(index))
    for field, leaf in named_leaves(moved).items():
        assert torch.equal(leaf, named_leaves(state)[field][index]), field


@each_mixer
def test_repeat_keeps_a_row_and_its_copies_together(name):
    mixer, state = state_of(name)
    repeated = states.repeat(state, 2)
    for field, leaf in named_leaves(repeated).items():
        assert torch.equal(leaf, named_leaves(state)[field][[0, 0, 1, 1, 2, 2]]), field
    x_t = torch.randn(6, DIM)
    y_t, _ = mixer.step(x_t, repeated)
    for copy in range(2):
        torch.testing.assert_close(y_t[copy::2], mixer.step(x_t[copy::2], state)[0])


@each_mixer
def test_detach_ends_the_gradient(name):
    mixer, _ = state_of(name)
    x = torch.randn(3, 7, DIM, requires_grad=True)
    _, state = mixer(x)
    assert any(leaf.requires_grad for leaf in named_leaves(state).values())
    detached = states.detach(state)
    assert not any(leaf.requires_grad for leaf in named_leaves(detached).values())
    for field, leaf in named_leaves(detached).items():
        assert torch.equal(leaf, named_leaves(state)[field]), field
    y, _ = mixer(torch.randn(3, 7, DIM), detached)
    y.sum().backward()
    assert x.grad is None


@each_mixer
def test_gradients_flow_through_select_and_repeat(name):
    mixer, _ = state_of(name)
    x = torch.randn(3, 7, DIM, requires_grad=True)
    state = states.select(states.repeat(mixer(x)[1], 2), torch.tensor([4]))
    y, _ = mixer(torch.randn(1, 2, DIM), state)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[2].any()
    assert not gradient[:2].any()


@each_mixer
def test_map_state_visits_every_leaf(name):
    _, state = state_of(name)
    seen = []
    mapped = states.map_state(lambda leaf: seen.append(leaf) or leaf + 1, state)
    assert type(mapped) is type(state)
    assert len(seen) == len(named_leaves(state))
    for field, leaf in named_leaves(mapped).items():
        assert torch.equal(leaf, named_leaves(state)[field] + 1), field


@each_mixer
@pytest.mark.parametrize("length", [1, 7, 40])
def test_state_size_is_the_bytes_of_one_row(name, length):
    mixer, state = state_of(name, length=length)
    held = sum(leaf.numel() * leaf.element_size() for leaf in named_leaves(state).values())
    assert mixer.state_size(length) * 3 == held


@each_mixer
def test_growth_is_as_registered(name):
    mixer, _ = state_of(name)
    small, large, huge = (mixer.state_size(length) for length in (10, 10_000, 20_000))
    growth = seqzoo.mixer_info(name).growth
    assert growth in ("constant", "linear", "window")
    assert {
        "constant": small == large == huge,
        "window": small < large == huge,
        "linear": small < large < huge,
    }[growth]


def test_errors_say_what_came():
    _, state = state_of(seqzoo.list_mixers()[0])
    with pytest.raises(ValueError, match=r"repeat.*-1"):
        states.repeat(state, -1)
    with pytest.raises(TypeError, match=r"select.*float32"):
        states.select(state, torch.tensor([0.5]))
    with pytest.raises(ValueError, match=r"reorder.*3.*2"):
        states.reorder(state, torch.tensor([0, 1]))
