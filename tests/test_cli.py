"""The command line: what it prints, and that whatever goes wrong is one line and a status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

import seqzoo
import seqzoo.lab
from seqzoo.cli import main

TINY = "--dim 16 --depth 1 --seq-len 16 --batch-size 2 --steps 2".split()


def test_help_without_arguments(seqzoo_cli):
    status, out, _ = seqzoo_cli()
    assert status == 0
    assert all(command in out for command in ("list", "info", "compare"))


def test_list(seqzoo_cli):
    status, out, _ = seqzoo_cli("list")
    assert status == 0
    assert all(name in out for name in seqzoo.list_mixers())
    status, out, _ = seqzoo_cli("list", "hgr*", "--op", "linear_scan")
    assert status == 0
    assert "hgru" in out
    assert "hgrn2" not in out
    assert "attention" not in out


def test_bench(seqzoo_cli, tmp_path):
    size = "--dim 16 --depth 1 --seq-len 8 --batch-size 1 --contexts 4 --threads 1".split()
    status, out, _ = seqzoo_cli("bench", "--mixers", "gla", *size, "--out", str(tmp_path / "b.json"))
    assert status == 0
    assert "training ms/step" in out
    figures = json.loads((tmp_path / "b.json").read_text())["figures"]
    assert {(f["code"], f["quantity"]) for f in figures if f["mixer"] == "gla"} >= {
        ("seqzoo", "training ms/step"),
        ("plain", "training ms/step"),
        ("seqzoo", "decode tokens/s to 4"),
    }
    assert all(f["value"] > 0 for f in figures)


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_info(seqzoo_cli, name):
    status, out, _ = seqzoo_cli("info", name)
    record = seqzoo.mixer_info(name)
    assert status == 0
    assert record.paper in out
    assert record.summary in out
    assert all(f"{option} = {default!r}" in out for option, default in record.options.items())


def test_compare(seqzoo_cli, text, tmp_path):
    out_folder = tmp_path / "out"
    status, out, err = seqzoo_cli(
        "compare", *TINY, "--mixers", "gla, lru", "--data", text, "--seeds", "2", "--out", str(out_folder)
    )
    assert status == 0, err
    printed = " ".join(out.split())  # a long path wraps the title
    assert all(word in printed for word in ("gla", "lru", "±", "unigram entropy", "1,584 bytes to train on"))
    assert "gla (seed 1): bits per byte" in err
    lines = [json.loads(line) for line in (out_folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "result" for line in lines) == 4
    assert json.loads((out_folder / "config.json").read_text())["comparison"]["mixers"] == ["gla", "lru"]


WRONG = {
    "unknown command": (["comprae"], 2, "compare"),
    "unknown option": (["compare", "--step", "3"], 2, "--steps"),
    "not a number": (["compare", "--dim", "x"], 2, "--dim"),
    "nothing listed": (["list", "zzz*"], 1, "there are"),
    "unknown op": (["list", "--op", "scan"], 1, "linear_scan"),
    "unknown growth": (["list", "--growth", "none"], 1, "constant"),
    "info of nothing": (["info", "hgrn3"], 1, "hgrn2"),
    "unknown mixer": (["compare", "--mixers", "hgrn3", "--data", "TEXT"], 1, "hgrn2"),
    "unknown in a pattern": (["compare", "--mixers", "gla+atention", "--data", "TEXT"], 1, "attention"),
    "nothing to import": (["compare", "--mixers", "no_such:Mixer", "--data", "TEXT"], 1, "no_such"),
    "not a mixer": (["compare", "--mixers", "json:JSONDecoder", "--data", "TEXT"], 1, "TokenMixer"),
    "no mixer": (["compare", "--mixers", ",", "--data", "TEXT"], 1, "at least one"),
    "missing data": (["compare", "--data", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    "short data": (["compare", "--data", "TEXT", "--seq-len", "5000"], 1, "seq_len=5000"),
    "no sequence": (["compare", "--data", "TEXT", "--seq-len", "0"], 1, "seq_len"),
    "wrong width": (["compare", *TINY, "--data", "TEXT", "--dim", "17"], 1, "17"),
    "no steps": (["compare", "--data", "TEXT", "--steps", "0"], 1, "steps"),
    "negative rate": (["compare", "--data", "TEXT", "--lr", "-1"], 1, "lr"),
    "no seeds": (["compare", "--data", "TEXT", "--seeds", "0"], 1, "seeds"),
    "negative threads": (["compare", "--data", "TEXT", "--threads", "-1"], 1, "threads"),
    "unknown device": (["compare", "--data", "TEXT", "--device", "gpu"], 1, "gpu"),
    "device without values": (["compare", "--data", "TEXT", "--device", "meta"], 1, "meta"),
    "out is a file": (["compare", *TINY, "--data", "TEXT", "--out", "TEXT"], 1, "TEXT"),
    "out under a file": (["compare", *TINY, "--data", "TEXT", "--out", "TEXT/out"], 1, "TEXT"),
    "diverging": (["compare", *TINY, "--data", "TEXT", "--lr", "1e38", "--mixers", "gla"], 1, "gla: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_is_one_line(seqzoo_cli, text, case):
    arguments, expected_status, words = WRONG[case]
    status, out, err = seqzoo_cli(*(argument.replace("TEXT", text) for argument in arguments))
    assert status == expected_status
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("seqzoo: ")
    assert words.replace("TEXT", text) in err


@pytest.mark.parametrize("module", ["typer", "rich", "torchmetrics"])
def test_a_missing_extra_is_named_before_training(seqzoo_cli, text, module, monkeypatch):
    monkeypatch.setattr(seqzoo, "lab", seqzoo.lab)  # so that it is again what sys.modules says, in the end
    for name in list(sys.modules):
        if name.split(".")[0] == module or name.startswith("seqzoo.lab"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    status, _, err = seqzoo_cli("compare", *TINY, "--data", text)
    assert status == 1
    assert err == f'seqzoo: this command needs {module}: pip install "seqzoo[lab]"\n'


def test_a_bug_keeps_its_traceback(text, monkeypatch):
    def bug(self, *arguments):
        raise ValueError("a bug")

    monkeypatch.setattr(seqzoo.LanguageModel, "forward", bug)
    with pytest.raises(ValueError, match="a bug"):
        main(["compare", *TINY, "--data", text])


def test_out_of_memory_is_a_line(seqzoo_cli, text, monkeypatch):
    monkeypatch.setattr(seqzoo.LanguageModel, "forward", lambda self, tokens: torch.empty(2**60))
    status, _, err = seqzoo_cli("compare", *TINY, "--data", text)
    assert status == 1
    assert err == "seqzoo: out of memory: try a smaller batch size, sequence length or width\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a child")
def test_interrupted_says_so_and_keeps_what_is_done(text, tmp_path):
    metrics = tmp_path / "out" / "metrics.jsonl"
    arguments = "compare --dim 16 --depth 1 --seq-len 16 --batch-size 2 --steps 100000 --mixers gla".split()
    child = subprocess.Popen(
        [sys.executable, "-m", "seqzoo.cli", *arguments, "--data", text, "--out", str(metrics.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err == "seqzoo: interrupted\n"
    for line in metrics.read_text().splitlines():
        assert json.loads(line)["event"] == "step"
