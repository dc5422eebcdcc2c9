"""`seqzoo train` and `seqzoo generate`: what they print, and what goes wrong is one line and a status."""

from __future__ import annotations

import math
import signal
import sys

import pytest
import torch

from seqzoo.lab.checkpoint import load_model
from seqzoo.lab.progress import RunProgress

TINY = "--dim 16 --depth 2 --seq-len 16 --batch-size 2 --steps 4 --checkpoint-every 2".split()


@pytest.fixture
def run(seqzoo_cli, text, tmp_path, monkeypatch):
    """Runs a command line in a folder of its own; TEXT is the text's path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("seqzoo.lab.progress.SECONDS_BETWEEN_LINES", math.inf)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: seqzoo_cli(*(argument.replace("TEXT", text) for argument in arguments))


def train(run, *more: str) -> str:
    """The checkpoint of a run in runs/hgrn2+attention."""
    status, out, err = run("train", "hgrn2,attention", *TINY, "--data", "TEXT", *more)
    assert status == 0, err
    return out.strip()


def test_train_says_what_it_reached_and_where_it_is(run):
    status, out, err = run("train", "hgrn2,attention", *TINY, "--data", "TEXT")
    assert (status, out) == (0, "runs/hgrn2+attention/checkpoints/step-00000004.safetensors\n")
    assert len(err.splitlines()) == 1
    assert err.startswith("hgrn2,attention: bits per byte ")
    assert "after 4 steps" in err


def test_options_are_those_of_the_mixers(run):
    options = ["--option", "num_heads=2", "--option", "norm_eps=1e-4"]
    status, out, err = run("train", "gla,hgrn2", *TINY, "--data", "TEXT", *options)
    assert status == 0, err
    assert [mixer["num_heads"] for mixer in load_model(out.strip()).config["mixer"]] == [2, 2]
    status, _, err = run("train", "--out", "runs/gla+hgrn2", "--resume", "--steps", "6")
    assert status == 0, err


def test_resume_takes_the_options_of_the_run(run):
    train(run)
    status, out, err = run("train", "--out", "runs/hgrn2+attention", "--resume", "--steps", "6")
    assert (status, out) == (0, "runs/hgrn2+attention/checkpoints/step-00000006.safetensors\n"), err
    assert load_model(out.strip()).config["dim"] == 16


def test_the_same_command_with_resume_starts_or_goes_on(run):
    assert train(run, "--resume") == train(run, "--resume")


def test_progress_says_how_long_it_will_take(run, monkeypatch):
    monkeypatch.setattr("seqzoo.lab.progress.SECONDS_BETWEEN_LINES", 0.0)
    _, _, err = run("train", "gla", *TINY, "--data", "TEXT")
    assert [line.split(" · ")[0] for line in err.splitlines()[:4]] == [
        f"gla: step {n}/4" for n in (1, 2, 3, 4)
    ]
    assert err.splitlines()[2].endswith("0:00:00 left")


def interrupt(self, record):
    if record.step == 3:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_keeps_the_step_it_was_in(run, monkeypatch):
    monkeypatch.setattr(RunProgress, "on_step", interrupt)
    status, out, err = run("train", "hgrn2", *TINY, "--data", "TEXT")
    assert (status, out) == (130, "")
    path = "runs/hgrn2/checkpoints/step-00000003.safetensors"
    assert err == f"seqzoo: interrupted after step 3 of 4; the last checkpoint is {path}\n"


WRONG = {
    "no mixer": (["train"], 1, "expected a mixer"),
    "nothing to resume": (["train", "--out", "nowhere", "--resume"], 1, "there is no run in nowhere"),
    "unknown mixer": (["train", "hgrn3", "--data", "TEXT"], 1, "hgrn2"),
    "unknown option": (["train", "hgrn2", "--sed", "1"], 2, "--seed"),
    "unknown option of a mixer": (
        ["train", "hgrn2,lru", *TINY, "--data", "TEXT", "--option", "num_heads=2"], 1, "num_heads",
    ),
    "no value": (["train", "hgrn2", "--data", "TEXT", "--option", "num_heads"], 1, "name=value"),
    "both": (["train", "hgrn2", "--resume", "--overwrite"], 1, "resume"),
    "no data": (["train", "hgrn2", "--data", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    "out is a file": (["train", "hgrn2", *TINY, "--data", "TEXT", "--out", "TEXT"], 1, "TEXT"),
    "wrong precision": (["train", "hgrn2", "--data", "TEXT", "--precision", "half"], 1, "bfloat16"),
    "again": (["train", "hgrn2,attention", *TINY, "--data", "TEXT"], 1, "already holds a run"),
    "another width": (
        ["train", "--out", "runs/hgrn2+attention", "--resume", "--dim", "32"], 1, "dim is 16",
    ),
    "diverging": (["train", "gla", *TINY, "--data", "TEXT", "--lr", "1e38"], 1, "steps"),
    "no checkpoint": (["generate", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    "not a checkpoint": (["generate", "TEXT"], 1, "of another kind"),
    "negative temperature": (["generate", "runs/hgrn2+attention", "--temperature", "-1"], 1, "temperature"),
    "no bytes": (["generate", "runs/hgrn2+attention", "--top-k", "0"], 1, "top_k"),
    "no share": (["generate", "runs/hgrn2+attention", "--top-p", "1.5"], 1, "top_p"),
    "no prompt": (["generate", "runs/hgrn2+attention", "--prompt", ""], 1, "prompt"),
    "negative count": (["generate", "runs/hgrn2+attention", "--max-new-tokens", "-1"], 1, "max_new_tokens"),
    "negative seed": (["generate", "runs/hgrn2+attention", "--seed", "-1"], 1, "seed"),
    "own mixer by name": (["generate", "runs/hgrn2+attention", "--mixer", "gla"], 1, "package.module:Class"),
    "no own mixer": (["generate", "runs/hgrn2+attention", "--mixer", "json:JSONDecoder"], 1, "TokenMixer"),
    "own mixer not there": (["generate", "runs/hgrn2+attention", "--mixer", "json:Nothing"], 1, "Nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_is_one_line(run, text, case):
    train(run)
    arguments, expected_status, words = WRONG[case]
    status, out, err = run(*arguments)
    assert (status, out) == (expected_status, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("seqzoo: ")
    assert words.replace("TEXT", text) in err


def test_generate_writes_what_the_model_does(run):
    path = train(run)
    tokens = load_model(path).generate(torch.tensor([list(b"the ")]), 12, temperature=0).tokens
    status, out, err = run("generate", path, "--prompt", "the ", "--max-new-tokens", "12", "--greedy")
    assert status == 0
    assert out.encode("utf-8", "surrogateescape") == b"the " + bytes(tokens[0].tolist())
    assert err.startswith("4 bytes read, 12 written, ")


def test_generate_draws_by_its_seed(run):
    path = train(run)
    texts = [run("generate", path, "--max-new-tokens", "20", *more)[1] for more in (
        ["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "1", "--top-k", "1"],
        ["--greedy"], [], [],
    )]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]
    assert texts[5] != texts[6]


OWN = """
import seqzoo.mixers.gla
class Own(seqzoo.mixers.gla.GLA):
    "A mixer that is not registered."
    registered_name = None
"""


def test_code_is_imported_on_the_users_word_alone(run, tmp_path):
    (tmp_path / "own_mixer.py").write_text(OWN)
    status, out, err = run("train", "own_mixer:Own", *TINY, "--data", "TEXT", "--out", "own")
    assert status == 0, err
    del sys.modules["own_mixer"]
    for command in (["train", "--out", "own", "--resume"], ["generate", "own"]):
        status, _, err = run(*command)
        assert status == 1
        assert "own_mixer:Own" in err
        assert "nothing is imported on a file's word" in err
        assert "own_mixer" not in sys.modules
    assert run("generate", "own", "--mixer", "own_mixer:Own")[0] == 0
    assert run("train", "own_mixer:Own", "--out", "own", "--resume")[0] == 0
    assert out.strip() == "own/checkpoints/step-00000004.safetensors"
