"""Checkpoints: whole or not at all, and nothing in one is ever run."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import seqzoo
from seqzoo.lab import LabError
from seqzoo.lab.checkpoint import FORMAT, find_checkpoint, load_model, read_checkpoint, write_checkpoint
from seqzoo.lab.training import RunConfig, train_model
from seqzoo.mixers.gla import GLA


@pytest.fixture
def trained(tmp_path, text):
    """The path of a checkpoint."""
    config = RunConfig(
        mixers=("hgrn2", "attention"), dim=16, depth=2, seq_len=16, batch_size=2, steps=2, data=text
    )
    return train_model(config, tmp_path / "run").checkpoint


class Own(GLA):
    """A mixer that is not registered."""

    registered_name = None


def rewritten(path, **changes):
    """The checkpoint with another model configuration."""
    record, tensors = read_checkpoint(path)
    record["model"] = {**record["model"], **changes}
    write_checkpoint(path, tensors, record)
    return path


def test_a_model_comes_back_as_it_was(trained):
    record, tensors = read_checkpoint(trained, "model")
    for path in (trained, trained.parent, trained.parent.parent):
        model = load_model(path)
        assert model.config == record["model"]
        assert not model.training
        assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert find_checkpoint(trained.parent.parent) == trained


def test_a_part_has_its_own_names(trained):
    _, everything = read_checkpoint(trained)
    _, model = read_checkpoint(trained, "model")
    assert {f"model.{name}" for name in model} == {name for name in everything if name.startswith("model.")}
    assert {name.split(".")[0] for name in everything} == {"model", "optimizer", "random"}


def test_a_failed_write_leaves_what_was_there(trained, monkeypatch):
    before = trained.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        rewritten(trained)
    assert trained.read_bytes() == before
    assert list(trained.parent.iterdir()) == [trained]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_said(trained, share):
    data = trained.read_bytes()
    trained.write_bytes(data[: int(share * len(data))])
    with pytest.raises(LabError, match=r"step-00000002.* is cut short, damaged or of another kind"):
        load_model(trained)


class Harmful:
    """What must not be run: pickle would call this."""

    def __reduce__(self):
        return pytest.fail, ("code from a file was run",)


FOREIGN = {
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Harmful())), "damaged or of another kind"),
    "torch.save": (lambda path: torch.save({"model": torch.zeros(3)}, path), "damaged or of another kind"),
    "text": (lambda path: path.write_text("the quick brown fox " * 10), "damaged or of another kind"),
    "another's": (
        lambda path: save_file({"w": torch.zeros(3)}, path),
        "not of seqzoo train: it has 'no format'",
    ),
    "a later one": (
        lambda path: save_file({"w": torch.zeros(3)}, path, {"format": "seqzoo checkpoint 9"}),
        "it has 'seqzoo checkpoint 9', not 'seqzoo checkpoint 1'",
    ),
    "no record": (lambda path: save_file({"w": torch.zeros(3)}, path, {"format": FORMAT}), "of another kind"),
    "broken record": (
        lambda path: save_file({"w": torch.zeros(3)}, path, {"format": FORMAT, "record": "{"}),
        "of another kind",
    ),
    "empty record": (lambda path: write_checkpoint(path, {"w": torch.zeros(3)}, {}), "cannot be built"),
    "list": (lambda path: write_checkpoint(path, {"w": torch.zeros(3)}, []), "cannot be built"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_said(tmp_path, kind):
    make, message = FOREIGN[kind]
    make(tmp_path / "step-00000001.safetensors")
    with pytest.raises(LabError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(LabError, match="is not there"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(LabError, match="has no finished checkpoint in it"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": [{"name": "antigravity:fly", "dim": 16}] * 2}, "nothing is imported on a file's word"),
        ({"mixer": [{"name": "hgrn3", "dim": 16}] * 2}, "did you mean 'hgrn2'"),
        ({"mixer": [{"dim": 16}]}, "cannot be built"),
        ({"mixer": "hgrn2"}, "cannot be built"),
        ({"mixer": None}, "cannot be built"),
        ({"mixer": [{"name": ["hgrn2"]}]}, "cannot be built"),
        ({"depth": 3}, "another shape than the configuration says, or is missing"),
        ({"vocab_size": 2**50}, "another shape"),  # refused before memory is asked for
        ({"dim": 32}, "cannot be built"),
        ({"ffn_dim": 2**40}, "another shape"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_configuration_that_is_not_the_models_is_said(trained, changes, message):
    with pytest.raises(LabError, match=message):
        load_model(rewritten(trained, **changes))


def test_an_own_mixer_is_loaded_on_the_users_word(tmp_path, text):
    name = f"{__name__}:Own"
    config = RunConfig(mixers=(name,), dim=16, depth=1, seq_len=16, batch_size=2, steps=1, data=text)
    path = train_model(config, tmp_path).checkpoint
    with pytest.raises(LabError, match=f"it names '{name}', and nothing is imported on a file's word"):
        load_model(path)
    model = load_model(path, mixers=[Own])
    assert type(model.backbone.mixers[0]) is Own
    train_model(replace(config, steps=2), tmp_path, resume=True)


def test_it_generates(trained):
    model = load_model(trained)
    tokens = torch.tensor([list(b"the ")])
    assert torch.equal(
        model.generate(tokens, 9, temperature=0).tokens,
        load_model(trained).generate(tokens, 9, temperature=0).tokens,
    )
    assert isinstance(model, seqzoo.LanguageModel)
