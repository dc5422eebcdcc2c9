"""What the lab measures of a model, and the model that reads both ways."""

from __future__ import annotations

import pytest
import torch

import seqzoo
from seqzoo.lab import Comparison, LabError
from seqzoo.lab.compare import build_model
from seqzoo.lab.measure import costs_at, training_memory
from seqzoo.lab.tasks import create_task
from seqzoo.lab.two_ways import TwoWayModel


def model(mixer="gla", depth=2) -> seqzoo.LanguageModel:
    torch.manual_seed(0)
    return seqzoo.LanguageModel(27, 16, depth, mixer=mixer)


def test_training_memory_is_what_autograd_keeps_and_no_weights():
    linear = torch.nn.Linear(4, 4)
    embedding = torch.nn.Embedding(2, 4)
    net = torch.nn.Sequential(embedding, linear, torch.nn.Sigmoid())
    kept = 3 * 8 + 3 * 4 * 4 + 3 * 4 * 4  # tokens, the input of the linear layer, the output of the sigmoid
    assert training_memory(net, 3) == kept


@pytest.mark.parametrize("mixer", ["gla", "attention"])
def test_costs_at_contexts(mixer):
    small, large = costs_at(model(mixer), (8, 32), repeats=1)
    assert (small.context, large.context) == (8, 32)
    assert large.state_bytes == model(mixer).state_size(32)
    assert 3 < large.training_bytes / small.training_bytes < 5
    assert min(small.decode_tokens_per_second, large.decode_tokens_per_second) > 0


def test_measuring_changes_neither_the_model_nor_its_gradients():
    net = model()
    before = [p.clone() for p in net.parameters()]
    costs_at(net, (8,), repeats=1)
    assert net.training
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(net.parameters(), before, strict=True))


def test_every_second_layer_reads_backwards():
    net = model(["gla", "hgrn2", "attention"], depth=3)
    tokens = torch.randint(27, (2, 7))
    x = net.embedding(tokens)
    shared = net.backbone._shared()
    x, _ = net.backbone.blocks[0](x, shared=shared[0])
    y, _ = net.backbone.blocks[1](x.flip(1), shared=shared[1])
    x, _ = net.backbone.blocks[2](y.flip(1), shared=shared[2])
    logits, state = TwoWayModel(net)(tokens)
    assert state is None
    torch.testing.assert_close(logits, net.logits(net.backbone.norm(x)))


def test_reading_both_ways_the_first_token_sees_the_last():
    net = TwoWayModel(model())
    tokens = torch.zeros(1, 6, dtype=torch.long)
    changed = tokens.clone()
    changed[0, -1] = 1
    assert not torch.equal(net(tokens)[0][0, 0], net(changed)[0][0, 0])
    assert torch.equal(net.model(tokens)[0][0, 0], net.model(changed)[0][0, 0])


def test_the_embedding_starts_as_wide_as_it_is_asked_to():
    task = create_task("mqar")
    for std, expected in ((0.3, 0.3), (None, 0.02)):
        net = build_model(Comparison(dim=64, embedding_std=std), task, "gla", seed=0)
        assert net.embedding.weight.std().item() == pytest.approx(expected, rel=0.05)
    with pytest.raises(LabError, match="embedding_std: expected a number above 0"):
        Comparison(embedding_std=0.0)
    with pytest.raises(LabError, match="contexts: expected 1 or more, got 0"):
        Comparison(contexts=(0,))


def test_reading_both_ways_takes_two_layers():
    task = create_task("digits", bidirectional=True)
    assert isinstance(build_model(Comparison(dim=16), task, "gla", seed=0), TwoWayModel)
    with pytest.raises(LabError, match="2 layers or more, got 1"):
        build_model(Comparison(dim=16, depth=1), task, "gla", seed=0)
