"""The lab: what a comparison trains on, how, and what it leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import seqzoo
from seqzoo.lab import (
    Comparison,
    LabError,
    NextByte,
    Text,
    TrainConfig,
    Trainer,
    compare_mixers,
    decode_speed,
    load_text,
    parameter_count,
)

TINY = TrainConfig(steps=3, batch_size=2, evaluations=2)


def letters(count: int, seed: int = 0) -> bytes:
    drawn = torch.randint(97, 123, (count,), generator=torch.Generator().manual_seed(seed))
    return bytes(drawn.tolist())


@pytest.fixture
def task(tmp_path) -> NextByte:
    (tmp_path / "text.txt").write_bytes(letters(2000))
    return NextByte(load_text(tmp_path / "text.txt", 16), 16, valid_windows=5)


# ---- data


def test_default_text_is_the_library_and_no_file_is_on_both_sides():
    text = load_text(None, 256)
    assert len(text.valid) / (len(text.train) + len(text.valid)) == pytest.approx(0.1, abs=0.01)
    assert len(text.train) > 1_000_000
    source = bytes(text.train.numpy()), bytes(text.valid.numpy())
    assert sum(Path(json.__file__).read_bytes() in part for part in source) == 1
    assert all(Path(pytest.__file__).read_bytes() not in part for part in source)
    assert load_text(None, 256).sha256 == text.sha256


def test_a_single_file_is_cut_near_its_end(tmp_path):
    data = letters(1000)
    (tmp_path / "a").write_bytes(data)
    text = load_text(tmp_path / "a", 16)
    assert bytes(text.train.numpy()) == data[:900]
    assert bytes(text.valid.numpy()) == data[900:]


def test_a_file_of_two_sequences_is_enough_and_one_byte_less_is_not(tmp_path):
    (tmp_path / "a").write_bytes(letters(34))
    text = load_text(tmp_path / "a", 16)
    assert (len(text.train), len(text.valid)) == (17, 17)
    (tmp_path / "a").write_bytes(letters(33))
    with pytest.raises(LabError, match=r"has 33 bytes, but .* seq_len=16 take 34"):
        load_text(tmp_path / "a", 16)


def test_a_folder_is_parted_by_whole_files_whatever_their_names(tmp_path):
    files = [letters(100 + number, number) for number in range(40)]
    for number, data in enumerate(files):
        (tmp_path / f"{number:02}").write_bytes(data)
    text = load_text(tmp_path, 16)
    train, valid = bytes(text.train.numpy()), bytes(text.valid.numpy())
    held_out = {data for data in files if data in valid}
    assert {data for data in files if data in train} == set(files) - held_out
    assert 2 <= len(held_out) <= 6

    for number in range(40):
        (tmp_path / f"{number:02}").rename(tmp_path / f"x{39 - number:02}")
    again = load_text(tmp_path, 16)
    assert {data for data in files if data in bytes(again.valid.numpy())} == held_out


def test_a_folder_counts_copies_once_and_skips_hidden_and_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes(letters(100))
    (tmp_path / "sub" / "copy.txt").write_bytes(letters(100))
    (tmp_path / "image").write_bytes(b"\0" * 100)
    (tmp_path / ".git" / "object").write_bytes(letters(100, 1))
    text = load_text(tmp_path, 16)
    assert bytes(text.train.numpy()) + bytes(text.valid.numpy()) == letters(100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.mkdir(), "has no text files in it"),
    ],
)
def test_no_data_is_said_in_a_line(tmp_path, make, message):
    make(tmp_path / "data")
    with pytest.raises(LabError, match=message) as caught:
        load_text(tmp_path / "data", 16)
    assert str(tmp_path / "data") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unigram_entropy():
    train = torch.zeros(10, dtype=torch.uint8)
    assert Text("four", train, torch.arange(4, dtype=torch.uint8)).unigram_entropy == pytest.approx(2)
    assert Text("one", train, train).unigram_entropy == 0


def test_batches_depend_on_seed_and_step_alone(task):
    inputs, targets = task.train_batch(5, 3, seed=1)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    torch.manual_seed(123)
    assert torch.equal(task.train_batch(5, 3, seed=1)[0], inputs)
    assert not torch.equal(task.train_batch(6, 3, seed=1)[0], inputs)
    assert not torch.equal(task.train_batch(5, 3, seed=2)[0], inputs)


def test_every_training_byte_can_be_drawn(tmp_path):
    (tmp_path / "a").write_bytes(letters(34))
    task = NextByte(load_text(tmp_path / "a", 16), 16)
    inputs, targets = task.train_batch(0, 4, seed=0)
    assert bytes(torch.cat([inputs[0], targets[0, -1:]]).tolist()) == letters(34)[:17]


def test_validation_windows_do_not_overlap_and_do_not_change(task):
    windows = [inputs for inputs, _ in task.valid_batches(2)]
    assert [len(some) for some in windows] == [2, 2, 1]
    assert torch.equal(torch.cat(windows), torch.cat([inputs for inputs, _ in task.valid_batches(5)]))
    valid = bytes(task.text.valid.numpy())
    starts = [valid.index(bytes(window.tolist())) for window in torch.cat(windows)]
    assert all(after - before >= 17 for before, after in zip(starts, starts[1:], strict=False))


# ---- training


def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(steps=100, lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [config.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize(
    ("steps", "evaluations", "after"), [(10, 2, [5, 10]), (3, 8, [1, 2, 3]), (7, 1, [7])]
)
def test_evaluations_are_spread_and_one_is_at_the_end(steps, evaluations, after):
    config = TrainConfig(steps=steps, evaluations=evaluations)
    assert [step for step in range(1, steps + 1) if config.evaluates_after(step)] == after


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch_size": -1}, {"lr": 0.0}, {"lr": math.nan}])
def test_a_wrong_budget_is_refused(wrong):
    with pytest.raises(LabError, match=f"{next(iter(wrong))}: expected"):
        TrainConfig(**wrong)


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decayed, kept = seqzoo.param_groups(model, lr=1.0, weight_decay=0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert [p.shape for p in kept["params"]] == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


def test_training_learns(task):
    model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
    records = []
    config = TrainConfig(steps=40, batch_size=4, lr=1e-2, evaluations=2)
    final = Trainer(model, task, config).run(records.append)
    assert [record.step for record in records] == list(range(1, 41))
    assert records[-1].tokens == 40 * 4 * 16
    first, last = (record.metric for record in records if record.metric is not None)
    assert last == final
    assert final < first < 8.5
    assert records[-1].loss < records[0].loss - 0.5


def test_the_metric_is_the_mean_over_all_targets_in_bits(task):
    torch.manual_seed(0)
    model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
    windows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in task.valid_batches(2)])
    value = Trainer(model, task, TINY).evaluate()
    assert value == pytest.approx(model.loss(windows).item() / math.log(2), rel=1e-5)


def test_targets_of_minus_100_do_not_count():
    from seqzoo.lab.metrics import BitsPerByte

    metric = BitsPerByte()
    metric.update(torch.zeros(1, 3, 4), torch.tensor([[0, -100, 2]]))
    metric.update(torch.tensor([[[0.0, -1e4]]]), torch.tensor([[1]]))
    assert metric.compute().item() == pytest.approx((2 + 2 + 1e4 / math.log(2)) / 3)


def test_a_loss_that_is_not_finite_stops_before_it_spoils_the_parameters(task):
    model = seqzoo.LanguageModel(256, 16, 1, mixer="gla")
    trainer = Trainer(model, task, TINY)
    trainer.train_step()
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        LabError, match=r"loss became nan after 1 of 3 steps: try a learning rate below 0\.004"
    ):
        trainer.train_step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# ---- comparison


def test_comparison_is_fair_reproducible_and_written_down(task, tmp_path):
    comparison = Comparison(mixers=("gla", "lru+attention"), dim=16, depth=2, seeds=(0, 1), training=TINY)
    steps = []
    results = list(
        compare_mixers(comparison, task, out=tmp_path / "a" / "b", on_step=lambda *step: steps.append(step))
    )
    assert [(result.mixer, result.seed) for result in results] == [
        ("gla", 0), ("lru+attention", 0), ("gla", 1), ("lru+attention", 1),
    ]  # fmt: skip
    assert len(steps) == 4 * TINY.steps
    for result in results:
        assert 0 < result.metric < 10
        assert result.train_tokens_per_second > 0
        assert result.decode_tokens_per_second > 0

    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config["comparison"]["training"]["steps"] == 3
    assert config["task"]["text"]["unigram_entropy"] == task.text.unigram_entropy
    assert config["environment"]["torch"] == torch.__version__
    for model in config["models"].values():
        assert seqzoo.LanguageModel.from_config(model).config == model

    lines = [json.loads(line) for line in (tmp_path / "a" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == (["step"] * 3 + ["result"]) * 4
    assert [line["bits_per_byte"] for line in lines if line["event"] == "result"] == [
        r.metric for r in results
    ]

    again = list(compare_mixers(comparison, task))
    assert [result.metric for result in again] == [result.metric for result in results]


def test_measured_sizes_are_the_models():
    model = seqzoo.LanguageModel(256, 16, 2, mixer="gla")
    assert parameter_count(model) == sum(p.numel() for p in model.parameters())
    assert decode_speed(model, 4, repeats=1) > 0
    assert model.training


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mixers": ("gla", "gal")}, "gla"),  # found before anything is trained
        ({"mixers": ()}, "mixers: expected at least one"),
        ({"mixers": ("gla", "gla")}, "each can be named once"),
        ({"mixers": ("gla+lru+gla",), "depth": 2}, "needs a depth of 3 or more"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"seeds": (-1,)}, "seed: expected 0 or more"),
        ({"depth": 0}, "depth: expected 1 or more"),
        ({"dim": 17}, "17"),
    ],
)
def test_a_wrong_comparison_is_refused_before_training(task, tmp_path, wrong, message):
    def fail(run, record):
        pytest.fail("trained")

    values = {"mixers": ("gla",), "dim": 16, "depth": 1, "training": TINY, **wrong}
    with pytest.raises(LabError, match=message):
        list(compare_mixers(Comparison(**values), task, out=tmp_path / "out", on_step=fail))
    assert not (tmp_path / "out").exists()


def test_results_are_not_overwritten_unasked(task, tmp_path):
    comparison = Comparison(mixers=("gla",), dim=16, depth=1, training=TINY)
    list(compare_mixers(comparison, task, out=tmp_path))
    kept = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(LabError, match="already holds results"):
        list(compare_mixers(comparison, task, out=tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    (tmp_path / "report.html").touch()
    list(compare_mixers(comparison, task, out=tmp_path, overwrite=True))
    assert not (tmp_path / "report.html").exists(), "a report of results that are gone"


def test_out_that_is_a_file(task, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(LabError, match="is a file, not a folder"):
        list(compare_mixers(Comparison(mixers=("gla",), dim=16, depth=1), task, out=tmp_path / "out"))
