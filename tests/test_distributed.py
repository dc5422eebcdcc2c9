"""Every mixer under DDP and FSDP2, in two processes: losses, gradients and weights are those of one."""

import json
import os
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
