"""Block, Backbone, LanguageModel and LowerBounds: what no law of a mixer says."""

import json

import pytest
import torch

import seqzoo
from seqzoo import LanguageModel, LowerBounds, states

PATTERNS = [
    *seqzoo.list_mixers(),
    ["hgrn2", "attention"],
    ["hgru", "lru", {"name": "attention", "window": 4}],
]


def model(mixer, depth=3, **options):
    torch.manual_seed(0)
    return LanguageModel(50, 32, depth, mixer=mixer, **options).double().eval()


def tokens(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mixer", PATTERNS, ids=str)
def test_a_stack_obeys_the_contract(mixer):
    net, ids = model(mixer), tokens(2, 20)
    whole, _ = net(ids)
    first, state = net(ids[:, :7])
    second, _ = net(ids[:, 7:], state)
    close(torch.cat([first, second], 1), whole)
    for donate in (False, True):
        state = net.init_state(2, capacity=20)
        for t in range(20):
            logits, state = net.step(ids[:, t], state, donate=donate)
            close(logits, whole[:, t])
    close(net(ids, mode="recurrent")[0], whole)
    cu_seqlens = torch.tensor([0, 0, 13, 20])
    packed, _ = net(ids[:1], cu_seqlens=cu_seqlens, max_seqlen=13)
    close(packed[:, 13:], net(ids[:1, 13:])[0])
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :5] = False
    padded, _ = net(ids, mask=mask)
    close(padded[1:, 5:], net(ids[1:, 5:])[0])


def test_a_state_is_a_tree_of_tensors():
    net = model(["hgrn2", "attention"], depth=2)
    _, state = net(tokens(3, 6))
    flat, spec = torch.utils._pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) and leaf.shape[0] == 3 for leaf in flat)
    again = torch.utils._pytree.tree_unflatten(flat, spec)
    order = torch.tensor([2, 0, 1])
    moved = states.reorder(again, order)
    ids = tokens(3, 4)
    close(net(ids[order], moved)[0], net(ids, state)[0][order])


def test_activation_checkpointing_changes_no_gradient():
    losses = {}
    for keep in (False, True):
        net = model("hgru", activation_checkpointing=keep)
        net.loss(tokens(2, 12)).backward()
        losses[keep] = {name: p.grad for name, p in net.named_parameters()}
    assert losses[False].keys() == losses[True].keys()
    for name, grad in losses[False].items():
        close(losses[True][name], grad)


def test_config_rebuilds_and_imports_nothing():
    net = model(["hgrn2", {"name": "attention", "window": 4}], dropout=0.1)
    again = LanguageModel.from_config(json.loads(json.dumps(net.config)))
    again.double().eval().load_state_dict(net.state_dict())
    assert torch.equal(again(tokens(1, 9))[0], net(tokens(1, 9))[0])
    config = net.config
    config["mixer"][0]["name"] = "seqzoo.mixers.hgrn2:HGRN2"
    with pytest.raises(ValueError, match="registered mixers only"):
        LanguageModel.from_config(config)


@pytest.mark.parametrize("form", ["lm", "exclusive"])
def test_lower_bounds(form):
    bounds = LowerBounds(4, 8, form)
    torch.testing.assert_close(bounds(), (torch.arange(4) / 4)[:, None].expand(4, 8))
    torch.nn.init.normal_(bounds.logits)
    gamma = bounds()
    assert (gamma[0] == 0).all()
    assert (gamma.diff(dim=0) > 0).all()
    assert (gamma < 1).all()
    share = bounds.logits.softmax(0)
    for k in range(4):
        torch.testing.assert_close(gamma[k], (share[1 : k + 1] if form == "lm" else share[:k]).sum(0))
    with pytest.raises(ValueError, match=r"lm, exclusive.*'ml'"):
        LowerBounds(4, 8, "ml")


def test_the_stack_learns_its_lower_bounds():
    net = model(["hgru", "attention", "hgrn2"], depth=6)
    assert net.backbone.lower_bounds.logits.shape == (4, 32)  # the layers that read one
    net.loss(tokens(2, 9)).backward()
    assert net.backbone.lower_bounds.logits.grad.abs().max() > 0
    assert model("hgru", lower_bound=None).backbone.lower_bounds is None
    unbounded = {"name": "hgrn2", "lower_bound": None}  # the published ablation
    assert model(unbounded).backbone.lower_bounds is None
    mixed = model([unbounded, "hgru"], depth=4)
    assert mixed.backbone.bounded == [1, 3]
    mixed.loss(tokens(2, 9)).backward()
    assert all(p.grad is not None for p in mixed.parameters())
    assert model("attention").backbone.lower_bounds is None


def test_each_layer_is_handed_its_own_bound():
    torch.manual_seed(0)
    stack = model(["hgru", "attention", "hgrn2"], depth=6).backbone
    torch.nn.init.normal_(stack.lower_bounds.logits, std=2.0)
    rows, x = iter(stack.lower_bounds()), torch.randn(2, 7, 32).double()
    h = x
    for block in stack.blocks:
        bound = None if block.mixer.registered_name == "attention" else {"lower_bound": next(rows)}
        h, _ = block(h, shared=bound)
    torch.testing.assert_close(stack(x)[0], stack.norm(h))
    _, state = stack(x[:, :-1])
    torch.testing.assert_close(stack.step(x[:, -1], state)[0], stack.norm(h)[:, -1])


def test_errors():
    with pytest.raises(ValueError, match=r"empty pattern"):
        LanguageModel(50, 32, 2, mixer=[])
    with pytest.raises(ValueError, match=r"hgrn3.*hgrn2"):
        LanguageModel(50, 32, 2, mixer="hgrn3")
    with pytest.raises(TypeError, match=r"num_head.*num_heads"):
        LanguageModel(50, 32, 2, mixer={"name": "hgrn2", "num_head": 4})
    with pytest.raises(ValueError, match=r"one width.*32, 64"):
        LanguageModel(50, 32, 2, mixer=["hgru", {"name": "hgru_real", "expand": 2}])
    with pytest.raises(ValueError, match=r"depth"):
        LanguageModel(50, 32, 0)
    net = model("hgru")
    with pytest.raises(TypeError, match=r"3 layers"):
        net(tokens(1, 3), net.init_state(1)[:2])
