"""Every mixer under DDP and FSDP2, in two processes: losses, gradients and weights are those of one."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seqzoo

WORKER = Path(__file__).parent / "distributed_worker.py"


ATTEMPTS = 3  # gloo on a busy machine has been seen to abort; wrong numbers are not tried again


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    out = tmp_path_factory.mktemp("distributed") / "out.json"
    options = ["--nproc-per-node", "2", "--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode == 0:
            return json.loads(out.read_text())
    raise AssertionError(done.stderr[-6000:])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
def test_two_processes_compute_what_one_does(differences):
    assert len(differences) == 4 * (len(seqzoo.list_mixers()) + 1)
    wrong = {what: value for what, value in differences.items() if not value < 1e-10}
    assert not wrong


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
def test_the_scripts_of_the_docs_run(tmp_path):
    """Two processes train on real bytes, and one reads the checkpoint that both wrote."""
    page = Path(__file__).parent.parent / "docs" / "plugins" / "distributed.md"
    for name, script in re.findall(
        r"^```py\n# (\S+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        (tmp_path / name).write_text(script, encoding="utf-8")

    def run(*command):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        call = [sys.executable, *command, str(tmp_path)]
        done = subprocess.run(call, capture_output=True, check=False, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-6000:]
        return done.stdout.decode(errors="replace")

    said = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(tmp_path / "train.py")
    )
    assert float(said.split()[0]) < 0.8 * math.log2(256)
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2
    assert run(str(tmp_path / "write.py")).strip()
