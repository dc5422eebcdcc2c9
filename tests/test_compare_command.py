"""``seqzoo compare --task``, ``seqzoo report`` and ``seqzoo tasks`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from seqzoo.lab.compare import Comparison, compare_mixers
from seqzoo.lab.tasks import create_task, list_tasks
from seqzoo.lab.tasks.images import _digits
from seqzoo.lab.train import TrainConfig

TINY = "--dim 16 --depth 2 --batch-size 2 --steps 2 --mixers gla".split()


@pytest.fixture
def run(seqzoo_cli):
    """Runs a command line; its status, stdout and stderr."""
    return lambda *arguments: seqzoo_cli(*map(str, arguments))


def test_a_task_with_its_options(run, tmp_path):
    options = ["--option", "pairs=2", "--option", "valid_examples=10", "--seq-len", 16]
    status, out, err = run("compare", *TINY, "--task", "mqar", *options, "--out", tmp_path / "a")
    assert status == 0, err
    assert "mqar: " in out and "pairs 2" in out and "accuracy" in out and "±" in out
    assert "unigram" not in out
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["task"]["name"], config["task"]["pairs"], config["task"]["seq_len"]) == ("mqar", 2, 16)
    assert config["comparison"]["seeds"] == [0, 1]
    assert "accuracy" in (tmp_path / "a" / "metrics.jsonl").read_text()
    assert "Task: mqar" in (tmp_path / "a" / "report.html").read_text()


def test_a_tasks_own_settings_unless_told_otherwise(run, tmp_path):
    run("compare", "--task", "parity", "--steps", 1, "--mixers", "gla", "--seeds", 1, "--out", tmp_path)
    comparison = json.loads((tmp_path / "config.json").read_text())["comparison"]
    assert (comparison["dim"], comparison["training"]["batch_size"]) == (64, 32)
    assert (comparison["training"]["steps"], comparison["mixers"]) == (1, ["gla"])


def test_both_ways_has_no_state_and_does_not_decode(run, tmp_path):
    arguments = ["--task", "digits", "--option", "bidirectional=True", "--out", tmp_path]
    status, out, _ = run("compare", *TINY, *arguments)
    assert status == 0
    assert out.count("none") == 2
    assert "Decoding speed" not in (tmp_path / "report.html").read_text()


def test_a_file_of_tokens(run, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200) % 7)
    status, out, err = run("compare", *TINY, "--seq-len", 8, "--data", tmp_path / "a.npy")
    assert status == 0, err
    assert "bits/token" in out


def test_report_merges_folders(run, tmp_path):
    for seed in (0, 5):
        arguments = ["--task", "parity", "--seed", seed, "--seeds", 1, "--out", tmp_path / str(seed)]
        assert run("compare", *TINY, *arguments)[0] == 0
    status, out, _ = run("report", tmp_path / "0", tmp_path / "5", "--out", tmp_path / "both.html")
    assert (status, out) == (0, f"{tmp_path / 'both.html'}\n")
    assert "seeds (0, 5)" in (tmp_path / "both.html").read_text()


def test_tasks_are_listed(run):
    status, out, _ = run("tasks")
    assert status == 0
    assert all(name in out for name in list_tasks())
    assert "[N, T + 1]" in out
    assert "pairs=4" in out


def test_without_scikit_learn_digits_say_what_to_install(run, monkeypatch):
    _digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    status, _, err = run("compare", "--task", "digits")
    assert status == 1
    assert err == 'seqzoo: this command needs sklearn: pip install "seqzoo[lab]"\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--task", "parrity"], "did you mean 'parity'?"),
        (["compare", "--task", "parity", "--option", "lenght=3"], "has no option 'lenght'"),
        (["compare", "--task", "parity", "--option", "seq_len"], "expected name=value"),
        (["compare", "--task", "parity", "--data", "x"], "parity has no option 'data'"),
        (["compare", "--task", "digits", "--seq-len", "3"], "digits has no option 'seq_len'"),
        (["compare", "--task", "tokens"], "give a .npy file"),
        (["compare", "--data", "/nowhere/a.npy"], "/nowhere/a.npy"),
        (["report", "/nowhere"], "/nowhere has no config.json"),
        (["report", "/nowhere", "--out", "/"], "out: / is a folder"),
    ],
)
def test_what_goes_wrong_is_one_line(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    assert err.startswith("seqzoo: ") and len(err.splitlines()) == 1
    assert message in err


def test_a_run_is_condensed_to_its_curves(tmp_path):
    training = TrainConfig(steps=2, batch_size=2)
    comparison = Comparison(mixers=("gla", "lru"), dim=16, seeds=(0, 1), training=training)
    list(compare_mixers(comparison, create_task("parity", seq_len=16, valid_examples=8), out=tmp_path))
    file = tmp_path / "kept.json"
    script = [sys.executable, "scripts/condense_comparison.py", str(tmp_path), str(file), "--note", "kept"]
    subprocess.run(script, check=True)
    kept = json.loads(file.read_text())
    assert (kept["note"], list(kept["mixers"]), kept["settings"]["seeds"]) == ("kept", ["gla", "lru"], [0, 1])
    for mixer in kept["mixers"].values():
        for seed in ("0", "1"):
            (step, last), end = mixer["curves"][seed][-1], mixer["accuracy"]["seeds"][seed]
            assert (step, last) == (2, end)
        values = mixer["accuracy"]["seeds"].values()
        assert mixer["accuracy"]["mean"] == pytest.approx(sum(values) / 2, abs=1e-3)
        assert "tokens_per_second" not in json.dumps(mixer)
    with (tmp_path / "metrics.jsonl").open() as file_lines:
        lines = [line for line in file_lines if '"result"' not in line or '"lru"' not in line]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    failed = subprocess.run(script, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "lru: no result of seed 0, 1" in failed.stderr
