"""Generation: token by token what whole passes over the growing sequence give; sampling, streaming, stopping, going on."""

import functools
import importlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

import seqzoo
from seqzoo import states
from seqzoo.generate import _steps, sample
from seqzoo.testing.comparing import named_leaves

VOCAB, DIM = 13, 16
WINDOWED = {"name": "attention", "window": 3}
PATTERNS = [
    *seqzoo.list_mixers(),
    ["hgrn2", "attention"],
    WINDOWED,
    {"name": "attention", "window": 6},  # shorter than some prompts, reached by others while decoding
]
each_pattern = pytest.mark.parametrize("mixer", PATTERNS, ids=str)


def make_model(mixer, seed=0, **options):
    """A model in float64, where no two logits are equal, that has opinions."""
    torch.manual_seed(seed)
    model = seqzoo.LanguageModel(VOCAB, DIM, 2, mixer=mixer, **options).double()
    torch.nn.init.normal_(model.embedding.weight)
    return model


def make_prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def by_whole_passes(model, prompt, count):
    """Greedy tokens, each from a pass over all before it."""
    tokens = prompt
    for _ in range(count):
        logits, _ = model(tokens[None])
        tokens = torch.cat([tokens, logits[0, -1:].argmax(-1)])
    return tokens[len(prompt) :]


def greedy(model, prompts, count, **options):
    return model.generate(prompts, count, temperature=0, **options)


@each_pattern
def test_greedy_is_the_whole_pass(mixer):
    model = make_model(mixer)
    prompts = make_prompts(5, 1, 9, 4)
    out = greedy(model, prompts, 8)
    expected = torch.stack([by_whole_passes(model, prompt, 8) for prompt in prompts])
    assert len(expected.unique()) > 2
    assert torch.equal(out.tokens, expected)
    assert out.lengths.tolist() == [8] * 4
    assert torch.equal(torch.stack(list(model.stream(prompts, 8, temperature=0)), 1), expected)


@each_pattern
def test_the_state_has_read_all_but_the_last_token(mixer):
    model = make_model(mixer)
    prompts = make_prompts(5, 1, 9, 4)
    tokens, _, state = greedy(model, prompts, 5)
    longer = greedy(model, prompts, 12).tokens
    kept = states.map_state(torch.clone, state)
    for _ in range(2):  # the state given is not changed
        assert torch.equal(greedy(model, tokens[:, -1:], 7, state=state).tokens, longer[:, 5:])
    for name, leaf in named_leaves(state).items():
        assert torch.equal(leaf, named_leaves(kept)[name])


@each_pattern
def test_a_next_turn_is_the_whole_pass(mixer):
    model = make_model(mixer)
    first, second = make_prompts(6, 2), make_prompts(3, 5, seed=2)
    tokens, _, state = greedy(model, first, 4)
    turn = [torch.cat([row[-1:], more]) for row, more in zip(tokens, second, strict=True)]
    whole = [torch.cat(parts) for parts in zip(first, tokens, second, strict=True)]
    expected = torch.stack([by_whole_passes(model, prompt, 4) for prompt in whole])
    assert torch.equal(greedy(model, turn, 4, state=state).tokens, expected)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_pads_may_stand_anywhere(side):
    model = make_model(["hgrn2", "attention"])
    prompts = make_prompts(3, 6)
    tokens = torch.full((2, 8), VOCAB + 5)  # what a pad holds changes nothing
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        start = {"left": 8 - len(prompt), "right": 0, "both": 1}[side]
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = True
    assert torch.equal(greedy(model, tokens, 5, mask=mask).tokens, greedy(model, prompts, 5).tokens)


# sampling


def test_the_seed_decides():
    model = make_model("hgrn2")
    prompts = make_prompts(4, 7)

    def draw(seed, **options):
        return model.generate(
            prompts, 20, generator=torch.Generator().manual_seed(seed), temperature=2.0, **options
        ).tokens

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0, top_p=1.0), draw(0))
    generator = torch.Generator().manual_seed(0)
    streamed = model.stream(prompts, 20, generator=generator, temperature=2.0)
    assert torch.equal(torch.stack(list(streamed), 1), draw(0))


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}, {"top_k": 1, "top_p": 0.5}], ids=str
)
def test_the_narrowest_choice_is_greedy(options):
    model = make_model("gla")
    prompts = make_prompts(4, 7)
    assert torch.equal(model.generate(prompts, 10, **options).tokens, greedy(model, prompts, 10).tokens)
    tied = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).expand(200, 4)
    if "temperature" not in options:
        assert sample(tied, **options).unique().tolist() == [1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        ({"top_k": 3}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_k": 99}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_p": 0.6}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),  # 0.4 of the 0.7 that top_k left is more than half
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_distribution(options, expected, dtype):
    draws = 20_000
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().to(dtype) + 3
    tokens = sample(logits.expand(draws, 4), **options, generator=torch.Generator().manual_seed(0))
    share = tokens.bincount(minlength=4) / draws
    slack = (
        0.015 + (dtype == torch.bfloat16) * 0.01
    )  # four standard deviations, and the rounding of the logits
    torch.testing.assert_close(share, torch.tensor(expected, dtype=share.dtype), atol=slack, rtol=0)
    assert (share[torch.tensor(expected) == 0] == 0).all()


# stopping


@each_pattern
def test_eos_stops_rows(mixer):
    model = make_model(mixer)
    prompts = make_prompts(5, 1, 9, 4)
    free = greedy(model, prompts, 10).tokens

    def ends(eos):
        return [row.index(eos) + 1 if eos in row else 10 for row in free.tolist()]

    eos = max(free.unique().tolist(), key=lambda token: len(set(ends(token))))
    first = ends(eos)
    assert len(set(first)) > 1
    tokens, lengths, state = greedy(model, prompts, 10, eos=eos, pad=2)
    assert lengths.tolist() == first
    assert tokens.shape[1] == max(first)
    for row, length in enumerate(first):
        assert torch.equal(tokens[row, :length], free[row, :length])
        assert (tokens[row, length:] == 2).all()
    streamed = torch.stack(list(model.stream(prompts, 10, temperature=0, eos=eos, pad=2)), 1)
    assert torch.equal(streamed, tokens)
    # a row that stopped early goes on from its eos, as if alone
    last = tokens.gather(1, lengths[:, None] - 1)
    with torch.no_grad():
        logits, _ = model(last, state)
        for row, length in enumerate(first):
            whole, _ = model(torch.cat([prompts[row], free[row, :length]])[None])
            torch.testing.assert_close(logits[row, -1], whole[0, -1])


def test_it_stops_when_all_rows_have():
    model = make_model("hgrn2")
    (prompt,) = make_prompts(4)
    free = greedy(model, [prompt], 6).tokens[0].tolist()
    count = free.index(free[2]) + 1
    steps = []
    step = model.step
    model.step = lambda *args, **options: steps.append(1) or step(*args, **options)
    tokens, lengths, _ = greedy(model, [prompt], 1000, eos=free[2])
    assert tokens.tolist() == [free[:count]]
    assert lengths.tolist() == [count]
    assert len(steps) == count - 1


@each_pattern
def test_steps_wait_for_no_device(mixer, monkeypatch):
    """A fake tensor has no value to read: whatever would wait for a device raises."""
    attention = importlib.import_module("seqzoo_kernels.attention")
    monkeypatch.setattr(attention, "tokens_held", lambda length: None)  # reads on a CPU alone
    with FakeTensorMode(), torch.no_grad():
        model = seqzoo.LanguageModel(VOCAB, DIM, 2, mixer=mixer).eval()
        logits, state = model.step(torch.zeros(2, dtype=torch.long), model.init_state(2, capacity=9))
        monkeypatch.setattr(model, "reserve", lambda state, room: state)  # before the steps it may read
        choose = functools.partial(sample, top_k=5, top_p=0.9)
        assert len(list(_steps(model, logits, state, 8, choose, None, 0))) == 8


# room


@each_pattern
@pytest.mark.parametrize("length", [0, 2, 7])
def test_a_reserved_state_goes_on_as_the_one_it_came_from(mixer, length):
    model = make_model(mixer)
    tokens = torch.stack(make_prompts(length + 6, length + 6, seed=3))
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 1:3] = False
    with torch.no_grad():
        _, state = model(tokens[:, :length], mask=mask)
        expected, end = model(tokens[:, length:], state)
        logits, grown_end = model(tokens[:, length:], model.reserve(state, 6))
        torch.testing.assert_close(logits, expected)
        again, _ = model(tokens, grown_end)
        torch.testing.assert_close(again, model(tokens, end)[0])
        stepped = model.reserve(model.reserve(states.map_state(torch.clone, state), 2), 6)
        for i in range(6):
            logits_t, stepped = model.step(tokens[:, length + i], stepped, donate=True)
            torch.testing.assert_close(logits_t, expected[:, i])


def test_room_is_what_the_longest_row_needs():
    mixer = seqzoo.create_mixer("attention", DIM)
    _, state = mixer(torch.randn(2, 5, DIM))
    grown = mixer.reserve(state, 3)
    assert grown.k.shape[1] == grown.v.shape[1] == 8
    assert (grown.k[:, 5:] == 0).all()
    assert mixer.reserve(grown, 3) is grown  # there is room already
    before = states.map_state(torch.clone, state)
    for _ in range(3):
        _, grown = mixer.step(torch.randn(2, DIM), grown, donate=True)
    assert all(map(torch.equal, state, before))  # a grown state shares nothing with the one it came from
    with pytest.raises(ValueError, match=r"full.*reserve\(state, room\)"):
        mixer.step(torch.randn(2, DIM), grown, donate=True)
    assert seqzoo.create_mixer(**{**WINDOWED, "dim": DIM}).reserve(mixer.init_state(2), 9).k.shape[1] == 3
    assert seqzoo.create_mixer("hgrn2", DIM).reserve(state, 3) is state
    with pytest.raises(ValueError, match="expected room to be at least 0, got -1"):
        mixer.reserve(state, -1)


# modes of a module, and edges


def test_dropout_is_off_and_modes_come_back():
    model = make_model("hgrn2", dropout=0.5)
    model.backbone.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    prompts = make_prompts(3)
    expected = by_whole_passes(make_model("hgrn2"), prompts[0], 6)
    assert torch.equal(greedy(model, prompts, 6).tokens[0], expected)
    assert [module.training for module in model.modules()] == modes
    run = model.stream(prompts, 6, temperature=0)
    assert next(run) == expected[0]
    assert torch.is_grad_enabled()
    run.close()
    assert [module.training for module in model.modules()] == modes
    assert not greedy(model, prompts, 2).tokens.requires_grad
    assert not any(leaf.requires_grad for leaf in named_leaves(greedy(model, prompts, 2).state).values())


def test_nothing_to_do():
    model = make_model(["hgrn2", "attention"])
    tokens, lengths, state = model.generate(make_prompts(3, 5), 0, eos=1)
    assert tokens.shape == (2, 0)
    assert lengths.tolist() == [0, 0]
    assert state[1].length.tolist() == [3, 5]
    tokens, lengths, _ = model.generate(torch.zeros(0, 4, dtype=torch.long), 5)
    assert tokens.shape == (0, 5)
    assert lengths.shape == (0,)
    assert list(model.stream(make_prompts(3), 0)) == []


PROMPTS = torch.zeros(2, 3, dtype=torch.long)
MASK = torch.tensor([[True] * 3, [False] * 3])


@pytest.mark.parametrize(
    ("error", "match", "prompts", "options"),
    [
        (ValueError, r"each prompt to have a token, got none in row 1", [PROMPTS[0], PROMPTS[0, :0]], {}),
        (ValueError, r"each prompt to have a token, got none in row 0", PROMPTS[:, :0], {}),
        (ValueError, r"each prompt to have a token, got none in row 1", PROMPTS, {"mask": MASK}),
        (ValueError, r"at least one prompt, got an empty list", [], {}),
        (ValueError, r"prompts of shape \(B, T\), or .*, got \(3,\)", PROMPTS[0], {}),
        (ValueError, r"prompts\[0\] of shape \(T\), got \(2, 3\)", [PROMPTS], {}),
        (TypeError, r"prompts to be a tensor or a list of tensors, got str", "text", {}),
        (TypeError, r"prompts\[0\] to be a tensor, got list", [[1, 2]], {}),
        (TypeError, r"prompts to hold integers, got torch.float32", PROMPTS.float(), {}),
        (ValueError, r"tokens from 0 to vocab_size - 1 = 12, got 13", PROMPTS + 13, {}),
        (ValueError, r"tokens from 0 to vocab_size - 1 = 12, got -1", PROMPTS - 1, {}),
        (ValueError, r"mask with prompts of shape \(B, T\)", [PROMPTS[0]], {"mask": MASK}),
        (ValueError, r"mask of shape \(B, T\) = \(2, 3\), got \(1, 3\)", PROMPTS, {"mask": MASK[:1]}),
        (TypeError, r"mask to be a bool tensor, .*, got torch.int64", PROMPTS, {"mask": PROMPTS}),
        (ValueError, r"max_new_tokens to be at least 0, got -1", PROMPTS, {"max_new_tokens": -1}),
        (TypeError, r"max_new_tokens to be an int, got 1.5", PROMPTS, {"max_new_tokens": 1.5}),
        (ValueError, r"temperature to be at least 0, .*, got -1", PROMPTS, {"temperature": -1}),
        (ValueError, r"temperature to be at least 0, .*, got nan", PROMPTS, {"temperature": float("nan")}),
        (TypeError, r"temperature to be a number, got 'hot'", PROMPTS, {"temperature": "hot"}),
        (ValueError, r"top_k to be at least 1, got 0", PROMPTS, {"top_k": 0}),
        (ValueError, r"top_p to be above 0 and at most 1, got 0", PROMPTS, {"top_p": 0}),
        (ValueError, r"top_p to be above 0 and at most 1, got 1.5", PROMPTS, {"top_p": 1.5}),
        (TypeError, r"top_p to be a number, got '0.9'", PROMPTS, {"top_p": "0.9"}),
        (ValueError, r"eos to be a token from 0 to vocab_size - 1 = 12, got 13", PROMPTS, {"eos": 13}),
        (ValueError, r"pad to be at least 0, got -100", PROMPTS, {"eos": 1, "pad": -100}),
        (ValueError, r"pad with eos", PROMPTS, {"pad": 1}),
        (TypeError, r"state that is a tuple of the states of 2 layers", PROMPTS, {"state": ()}),
        (TypeError, r"topk", PROMPTS, {"topk": 3}),
    ],
)
def test_errors_say_what_is_wrong(error, match, prompts, options):
    model = make_model("hgrn2")
    options = {"max_new_tokens": 2, **options}
    with pytest.raises(error, match=match):
        model.generate(prompts, **options)
    if "state" not in options:  # a stream looks at its state when it starts
        with pytest.raises(error, match=match):
            model.stream(prompts, **options)
    assert model.training
