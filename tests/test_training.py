"""Training runs: what they compute, and that whatever stops one loses nothing that was finished."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import seqzoo
from seqzoo.lab import LabError, NextByte, TrainConfig, Trainer, load_text, train
from seqzoo.lab.checkpoint import Checkpoints, read_checkpoint
from seqzoo.lab.errors import Interrupted
from seqzoo.lab.training import RunConfig, resumed_config, train_model
from seqzoo.mixers.gla import GLA

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(text) -> RunConfig:
    return RunConfig(
        mixers=("lru", "hgrn2"), dim=16, depth=2, dropout=0.1, seq_len=16, batch_size=4, data=text,
        steps=8, checkpoint_every=2, evaluations=2,
    )  # fmt: skip


def send(number: int, at: int):
    """What sends this process a signal in a step."""
    return lambda record: signal.raise_signal(number) if record.step == at else None


def metrics(out: Path) -> list[dict[str, object]]:
    """What was logged, but for the times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "checkpoint")} for line in lines]


def steps_kept(out: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in Checkpoints(out / "checkpoints", 1).paths()]


def assert_same_run(one: Path, other: Path) -> None:
    """Their metrics and newest checkpoints are bitwise equal."""
    assert metrics(one) == metrics(other)
    assert steps_kept(one)[-1] == steps_kept(other)[-1]
    (first, tensors), (second, others) = (
        read_checkpoint(Checkpoints(out / "checkpoints", 1).newest()) for out in (one, other)
    )
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


# ---- what a step computes


def test_each_mixer_says_how_its_parameters_are_trained():
    model = seqzoo.LanguageModel(256, 16, 2, mixer=["lru", "gla"])
    groups = seqzoo.param_groups(model, lr=1.0, weight_decay=0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rules = {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert rules.keys() == set(names.values())
    lru = "backbone.blocks.0.mixer."
    assert {name for name, rule in rules.items() if rule == (0.5, 0.0)} == {
        lru + name for name in ("nu_log", "theta_log", "gamma_log", "B_re", "B_im")
    }
    assert rules[lru + "C_re"] == rules[lru + "D"] == rules["embedding.weight"] == (1.0, 0.1)
    assert rules["backbone.norm.weight"] == (1.0, 0.0)
    model.embedding.weight.requires_grad_(False)
    frozen = seqzoo.param_groups(model, lr=1.0, weight_decay=0.1)
    assert all(p is not model.embedding.weight for group in frozen for p in group["params"])


def test_the_schedule_scales_each_group(text):
    model = seqzoo.LanguageModel(256, 16, 1, mixer="lru")
    trainer = Trainer(model, NextByte(load_text(text, 16), 16), TrainConfig(steps=10, lr=1e-3, warmup=0.5))
    trainer.train_step()
    assert sorted({group["lr"] for group in trainer.optimizer.param_groups}) == pytest.approx([1e-4, 2e-4])


class Gaps(NextByte):
    """Targets of which some do not count, fewer in some rows."""

    def train_batch(self, step, batch_size, seed):
        inputs, targets = super().train_batch(step, batch_size, seed)
        return inputs, targets.masked_fill(torch.arange(16) < torch.arange(batch_size)[:, None] * 3, -100)


def test_a_step_in_parts_is_the_step(text):
    task = Gaps(load_text(text, 16), 16)
    losses, gradients = [], []
    for accumulate in (1, 2, 4):
        torch.manual_seed(0)
        model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
        trainer = Trainer(model, task, TrainConfig(steps=1, batch_size=4, accumulate=accumulate))
        losses.append(trainer.train_step().loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses == pytest.approx([losses[0]] * 3)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_the_loss_is_the_mean_over_the_targets_that_count(text):
    task = Gaps(load_text(text, 16), 16)
    model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
    inputs, targets = task.train_batch(0, 4, 0)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten())
    loss = Trainer(model, task, TrainConfig(steps=1, batch_size=4)).train_step().loss
    assert loss == pytest.approx(expected.item())


def test_bfloat16_trains_float32_parameters(text):
    torch.manual_seed(0)
    model = seqzoo.LanguageModel(256, 16, 2, mixer=["hgrn2", "attention"])
    task = NextByte(load_text(text, 16), 16)
    losses = []
    config = TrainConfig(steps=30, lr=1e-2, precision="bfloat16", evaluations=1)
    metric = Trainer(model, task, config).run(lambda record: losses.append(record.loss))
    assert losses[-1] < losses[0] - 0.5
    assert metric < 8
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"accumulate": 3}, "batch_size: expected a multiple of 3"),
        ({"accumulate": 0}, "accumulate: expected 1"),
        ({"precision": "float16"}, "precision: expected one of float32, bfloat16"),
        ({"mixers": ()}, "mixers: expected 1 to depth=2, got none"),
        ({"mixers": ("gla",) * 3}, "mixers: expected 1 to depth=2"),
        ({"mixers": ("glaa",)}, "did you mean 'gla'"),
        ({"dropout": 1.0}, "dropout: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"keep": 0}, "keep: expected"),
        ({"checkpoint_every": 0}, "checkpoint_every: expected"),
    ],
)
def test_a_wrong_run_is_refused_before_it_leaves_a_trace(config, tmp_path, wrong, message):
    with pytest.raises(LabError, match=message):
        train_model(replace(config, **wrong), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- what a run leaves


def test_a_run_leaves_its_configuration_metrics_and_newest_checkpoints(config, tmp_path):
    trained = train_model(config, tmp_path)
    lines = metrics(tmp_path)
    assert [line["event"] for line in lines] == ["step"] * 8 + ["result"]
    assert lines[-1]["metric"] == lines[-2]["bits_per_byte"] == trained.metric
    assert steps_kept(tmp_path) == [4, 6, 8]
    assert trained.checkpoint == tmp_path / "checkpoints" / "step-00000008.safetensors"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["run"] == json.loads(json.dumps(asdict(config)))
    record, _ = read_checkpoint(trained.checkpoint)
    assert record["run"] == saved["run"]
    assert (record["step"], record["metric"]) == (8, trained.metric)
    assert seqzoo.LanguageModel.from_config(record["model"]).config == record["model"]


def test_a_run_is_not_overwritten_unasked(config, tmp_path):
    train_model(config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(LabError, match="already holds a run"):
        train_model(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert steps_kept(tmp_path) == [4, 6, 8]
    train_model(replace(config, steps=3), tmp_path, overwrite=True)
    assert steps_kept(tmp_path) == [2, 3]


# ---- stopping and going on


@pytest.mark.parametrize("stops", [(1,), (4,), (3, 6)])
def test_a_stopped_run_goes_on_to_the_same_bits(config, tmp_path, stops):
    train_model(config, tmp_path / "whole")
    for stop in stops:
        torch.manual_seed(stop)  # whatever happened in between
        with pytest.raises(Interrupted, match=f"interrupted after step {stop} of 8; the last checkpoint is"):
            train_model(config, tmp_path / "parts", resume=True, on_step=send(signal.SIGINT, stop))
        assert steps_kept(tmp_path / "parts")[-1] == stop
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_asked_to_stop_after_its_last_step_a_run_is_done(config, tmp_path):
    train_model(config, tmp_path, on_step=send(signal.SIGINT, config.steps))
    assert metrics(tmp_path)[-1]["event"] == "result"


def test_signals_have_their_usual_effect_afterwards(config, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        train_model(config, tmp_path, on_step=send(signal.SIGTERM, 3))
    assert stopped.value.status == 128 + signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_ctrl_c_stops_at_once(config, tmp_path):
    def twice(record):
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_model(config, tmp_path, on_step=twice)
    assert steps_kept(tmp_path) == [2]


def test_what_a_kill_left_half_written_is_cut_away(config, tmp_path):
    train_model(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_model(config, tmp_path / "parts", on_step=send(signal.SIGINT, 4))
    folder = tmp_path / "parts" / "checkpoints"
    (folder / "step-00000006.safetensors.partial").write_bytes(b"half")
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "step", "step": 5}) + '\n{"event": "st')
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert not list(folder.glob("*.partial"))


def test_a_run_killed_before_its_first_checkpoint_starts_again(config, tmp_path):
    train_model(config, tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n{"ev')
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(config, tmp_path):
    first = train_model(config, tmp_path)
    before = metrics(tmp_path)
    assert train_model(config, tmp_path, resume=True) == first
    assert metrics(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_random_moments(tmp_path):
    command = [sys.executable, "scripts/kill_battery.py", "--kills", "4", "--json", str(tmp_path / "kills")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads((tmp_path / "kills").read_text())
    assert figures["kills"] == figures["none_lost"] == 4
    assert figures["same_metrics"]
    assert figures["same_tensors"]


# ---- faults


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(config, tmp_path, monkeypatch):
    right, calls = train._summed_loss, []

    def wrong(logits, targets):
        calls.append(1)
        return right(logits, targets) * (math.nan if len(calls) == 6 else 1)

    monkeypatch.setattr(train, "_summed_loss", wrong)
    with pytest.raises(LabError, match=r"loss became nan after 5 of 8 steps: .*; the last .*step-00000004"):
        train_model(config, tmp_path / "parts")
    assert steps_kept(tmp_path / "parts") == [2, 4]
    monkeypatch.undo()
    train_model(config, tmp_path / "whole")
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_parameters_that_are_not_finite_are_not_kept(config, tmp_path):
    torch.manual_seed(0)
    model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
    trainer = Trainer(model, NextByte(load_text(config.data, 16), 16), config)
    trainer.train_step()
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(trainer, {})
    trainer.train_step()
    with torch.no_grad():
        model.embedding.weight[3, 5] = math.inf
    with pytest.raises(LabError, match=r"model\.embedding\.weight has numbers .* not finite after step 2"):
        checkpoints.save(trainer, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000001.safetensors"]


def test_a_truncated_checkpoint_is_not_resumed_from(config, tmp_path):
    train_model(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_model(config, tmp_path / "parts", on_step=send(signal.SIGINT, 5))
    path = tmp_path / "parts" / "checkpoints" / "step-00000005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = metrics(tmp_path / "parts")
    with pytest.raises(LabError, match=r"step-00000005.* is cut short"):
        train_model(config, tmp_path / "parts", resume=True)
    assert metrics(tmp_path / "parts") == before
    path.unlink()
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_parameter_without_gradient_is_resumed(config, tmp_path, monkeypatch):
    class Idle(GLA):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.idle = torch.nn.Parameter(torch.ones(3))

    monkeypatch.setattr("seqzoo.lab.training.build_model", lambda *_: build(Idle))
    for steps in (2, 4):
        train_model(replace(config, mixers=("gla",), steps=steps), tmp_path, resume=True)
    assert steps_kept(tmp_path) == [2, 4]


def build(mixer) -> seqzoo.LanguageModel:
    torch.manual_seed(0)
    return seqzoo.LanguageModel(256, 16, 1, mixer=mixer)


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


@full
def test_a_full_disk_loses_no_checkpoint(config, tmp_path):
    train_model(config, tmp_path / "whole")
    folder = tmp_path / "parts" / "checkpoints"
    folder.mkdir(parents=True)

    def fill(record):  # what is written into this name goes to a full disk
        if record.step == 5:
            (folder / "step-00000006.safetensors.partial").symlink_to("/dev/full")

    with pytest.raises(LabError, match=r"step-00000006.* could not be written: No space .*step-00000004"):
        train_model(config, tmp_path / "parts", on_step=fill)
    assert [path.name for path in sorted(folder.iterdir())] == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]
    train_model(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@full
def test_a_full_disk_from_the_start(config, tmp_path):
    (tmp_path / "config.json.partial").symlink_to("/dev/full")
    with pytest.raises(LabError, match=r"could not be written: No space left.*; there is no checkpoint yet"):
        train_model(config, tmp_path)


@full
def test_metrics_on_a_full_disk(config, tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(LabError, match=r"metrics\.jsonl could not be written: No space left"):
        train_model(config, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"), [("dog", "1,760 bytes then, 1,763 now"), (None, "as long, but other bytes")]
)
def test_data_that_has_changed_is_said(config, tmp_path, text, change, message):
    train_model(config, tmp_path / "out")
    data = Path(text).read_text()
    Path(text).write_text(data + change if change else data.replace("fox", "cat", 1))
    with pytest.raises(LabError, match=f"text.txt has changed since the checkpoint: {message}"):
        train_model(config, tmp_path / "out", resume=True)
    assert steps_kept(tmp_path / "out") == [4, 6, 8]


def test_data_may_have_moved(config, tmp_path, text):
    train_model(replace(config, steps=4), tmp_path / "out")
    moved = Path(text).rename(tmp_path / "moved.txt")
    given = resumed_config(tmp_path / "out", {"data": str(moved), "steps": 8, "lr": 1e-3})
    assert (given.steps, given.lr, given.mixers) == (8, 1e-3, config.mixers)
    train_model(given, tmp_path / "out", resume=True)
    assert steps_kept(tmp_path / "out")[-1] == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 32}, "dim is 16 in .*, got 32"),
        ({"mixers": ("gla",)}, "mixers is lru,hgrn2 in .*, got gla"),
        ({"options": {"num_heads": 2}}, "options is none in .*, got num_heads=2"),
    ],
)
def test_what_makes_the_model_cannot_change(config, tmp_path, given, message):
    train_model(replace(config, steps=2), tmp_path)
    with pytest.raises(LabError, match=message):
        resumed_config(tmp_path, given)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": {"dim": 3}}', '{"run": 3}'])
def test_a_foreign_configuration_is_said(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(LabError, match=r"config\.json is not of seqzoo train"):
        resumed_config(tmp_path, {})


def test_a_checkpoint_of_another_model_is_said(config, tmp_path):
    train_model(replace(config, steps=2), tmp_path)
    with pytest.raises(LabError, match="does not fit this model"):
        train_model(replace(config, dim=32), tmp_path, resume=True)


# ---- several processes


def torchrun(out: Path, text: str, *more: str) -> None:
    command = "-m torch.distributed.run --nproc-per-node 2 --standalone -m seqzoo train hgrn2,lru".split()
    size = "--dim 16 --depth 2 --seq-len 16 --batch-size 4 --accumulate 2 --evaluations 2".split()
    steps = ["--steps", "8", "--checkpoint-every", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *command, *size, *steps, "--data", text, "--out", str(out), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_two_processes_compute_what_one_does_and_go_on_to_the_same_bits(config, tmp_path, text):
    torchrun(tmp_path / "two", text)
    train_model(replace(config, mixers=("hgrn2", "lru"), dropout=0.0), tmp_path / "one")
    for one, two in zip(metrics(tmp_path / "one")[:-1], metrics(tmp_path / "two")[:-1], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["tokens"] == two["tokens"]

    (tmp_path / "parts" / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "checkpoints/step-00000004.safetensors"):
        (tmp_path / "parts" / name).write_bytes((tmp_path / "two" / name).read_bytes())
    torchrun(tmp_path / "parts", text, "--resume")
    assert_same_run(tmp_path / "parts", tmp_path / "two")
