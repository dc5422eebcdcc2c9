"""seqzoo's models in torchtitan: the configuration, the weights and the data; test_plugins.py trains with its trainer."""

import json
import warnings

import pytest
import torch

import seqzoo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="not among the tests' needs: .ci/run adds it")
    import torchtitan.config
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from seqzoo_plugins.torchtitan import ByteLoader, ByteTokenizer, SeqzooModel
    from seqzoo_plugins.torchtitan.config_registry import configuration
    from seqzoo_plugins.torchtitan.released import lend_names

PATTERNS = [*seqzoo.list_mixers(), "hgrn2+attention"]
each_pattern = pytest.mark.parametrize("name", PATTERNS)
SMALL = {"dim": 32, "depth": 2}
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan, and of what it imports


def parse(*arguments):
    manager = torchtitan.config.ConfigManager()
    return manager.parse_args(["--module", "seqzoo_plugins.torchtitan", *arguments])


@each_pattern
def test_a_configuration_by_name_builds_the_model(name):
    config = parse("--config", name, "--training.steps", "7", "--dataloader.seed", "3")
    assert (config.training.steps, config.dataloader.seed) == (7, 3)
    assert config.model_spec.flavor == name
    json.dumps(config.to_dict())
    model = config.model_spec.model
    model.dim, model.depth = 32, 2
    model.update_from_config(config=config)
    with torch.device("meta"):
        built = model.build()
    built.verify_module_protocol()
    assert built.layers is built.get_submodule("layers")
    assert model.get_nparams_and_flops(built, 512)[0] == sum(p.numel() for p in built.parameters())


@each_pattern
def test_it_starts_as_the_language_model_does_and_computes_the_same(name):
    config = SeqzooModel.Config(mixer=name.split("+"), **SMALL)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.init_weights(buffer_device=None)
    torch.manual_seed(5)
    own = seqzoo.LanguageModel(256, 32, 2, mixer=name.split("+"))
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in model.model.state_dict().items())
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(model(tokens), own(tokens)[0])


@each_pattern
def test_a_document_starts_from_nothing(name):
    torch.manual_seed(0)
    model = SeqzooModel.Config(mixer=name.split("+"), **SMALL).build()
    tokens = torch.arange(20).view(2, 10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        found = model(tokens, positions)
        for row, cuts in enumerate(([0, 4, 10], [0, 3, 6, 10])):
            for start, end in zip(cuts, cuts[1:], strict=False):
                torch.testing.assert_close(found[row, start:end], model(tokens[row : row + 1, start:end])[0])


@pytest.mark.parametrize("name", ["lru", "hgrn2+attention"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_train_by_their_mixers_rules(name, wrapped):
    config = configuration(name.split("+"), lr=0.01, **SMALL)
    model = config.model_spec.model.build()
    rules = {
        parameter: (group["lr"], group["weight_decay"])
        for group in seqzoo.param_groups(model.model, lr=0.01, weight_decay=0.1)
        for parameter in group["params"]
    }
    if wrapped:
        from torchtitan.distributed.activation_checkpoint import FullAC

        FullAC.Config().build().apply(model)
    config.optimizer.implementation = "for-loop"
    (optimizer,) = config.optimizer.build(model_parts=[model])
    found = {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found == rules


def test_batches_are_those_of_seqzoo_train_and_go_on(text):
    def loader(rank):
        return ByteLoader.Config(dataset_path=text, seed=2).build(
            dp_world_size=2,
            dp_rank=rank,
            tokenizer=ByteTokenizer.Config().build(),
            seq_len=16,
            local_batch_size=3,
        )

    one, two = loader(0), loader(1)
    expected = one.task.train_batch(1, 6, 2)
    for each in (one, two):
        rows = iter(each)
        next(rows)
        kept = each.state_dict()
        again = loader(0 if each is one else 1)
        again.load_state_dict(kept)
        (inputs, targets), (same, _) = next(rows), next(iter(again))
        assert torch.equal(inputs["input"], same["input"])
        half = slice(0, 3) if each is one else slice(3, 6)
        assert torch.equal(inputs["input"], expected[0][half])
        assert torch.equal(targets, expected[1][half])


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer.Config().build(tokenizer_path="nowhere")
    assert tokenizer.decode(tokenizer.encode("Größe")) == "Größe"
    assert tokenizer.get_vocab_size() == 256


def with_parallelism(**degrees):
    config = configuration("gla", **SMALL)
    for name, value in degrees.items():
        setattr(config.parallelism, name, value)
    return config


def with_chunked_loss():
    config = with_parallelism()
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())
    return config


WRONG = {
    "tensor parallel": (
        lambda: with_parallelism(tensor_parallel_degree=2),
        "tensor_parallel_degree to be 1, got 2",
    ),
    "another backend": (
        lambda: with_parallelism(spmd_backend="spmd_types"),
        "'partial_dtensor', got 'spmd_types'",
    ),
    "a loss of chunks": (with_chunked_loss, "CrossEntropyLoss, got ChunkedLossWrapper"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_cannot_do_is_said(case):
    make, words = WRONG[case]
    config = make()
    with pytest.raises(ValueError, match=words):
        config.model_spec.model.update_from_config(config=config)


def test_an_unknown_mixer_is_said():
    with pytest.raises(ValueError, match="hgrn2"):
        parse("--config", "hgrn3")


def test_names_that_a_release_of_torch_lacks_are_lent(monkeypatch):
    monkeypatch.delattr(torch.distributed.fsdp, "DataParallelMeshDims")
    monkeypatch.delattr(torch.distributed, "set_timeout")
    assert lend_names() == ["set_timeout", "DataParallelMeshDims"]
    assert lend_names() == []
    assert torch.distributed.set_timeout is torch.distributed.distributed_c10d._set_pg_timeout
