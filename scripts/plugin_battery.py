"""Train with each framework and each mixer, undisturbed and killed, and see that it learns, resumes and generates the same.

    python scripts/plugin_battery.py [--frameworks transformers,lightning] [--mixers hgrn2,gla] [--json FILE]

A row a pair: the validation loss is below the unigram entropy; a run that died of SIGKILL and was started again ends with
the same loss and the same weights; the framework's own generation and `seqzoo generate` write the same bytes.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from plugin_loops import LOOPS, NEW, PROCESSES, PROMPT, Run

from seqzoo.lab.checkpoint import read_checkpoint

MIXERS = ("hgrn2", "hgru", "gla", "lru", "attention", "hgrn2+attention")
FORKS = multiprocessing.get_context("forkserver")  # a child starts with everything imported
COMMON = ["plugin_loops", "torch._dynamo", "seqzoo.cli", "seqzoo.lab.metrics"]
IMPORTS = {
    "transformers": ["seqzoo_plugins.transformers", "transformers.trainer", "accelerate"],
    "lightning": ["seqzoo_plugins.lightning"],
    "fabric": ["lightning"],
    "fsdp2": ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"],
    "torchtitan": ["pretend_accelerator", "seqzoo_plugins.torchtitan.config_registry"],
}


def child(framework: str, run: Run) -> None:
    """A run in a process of its own, its output in a file."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
    with (run.folder / f"log-{run.rank}").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        LOOPS[framework](run)


def generate(weights: Path, out: Path) -> None:
    """The command `seqzoo generate`."""
    from seqzoo.cli import main

    with out.open("wb") as file, contextlib.suppress(SystemExit):
        os.dup2(file.fileno(), 1)
        main(
            ["generate", str(weights), "--greedy", "--prompt", PROMPT.decode(), "--max-new-tokens", str(NEW)]
        )
        sys.stdout.flush()


def start(framework: str, run: Run) -> list[BaseProcess]:
    """All processes of a run."""
    size = PROCESSES.get(framework, 1)
    run.folder.mkdir(parents=True, exist_ok=True)
    runs = [replace(run, rank=rank, processes=size) for rank in range(size)]
    started: list[BaseProcess] = [FORKS.Process(target=child, args=(framework, each)) for each in runs]
    for process in started:
        process.start()
    return started


def finish(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def complete(framework: str, run: Run) -> dict[str, Any]:
    """A run to its end, and what it left."""
    if any(finish(start(framework, run))):
        raise SystemExit(f"{framework} failed: {(run.folder / 'log-0').read_text()[-4000:]}")
    result: dict[str, Any] = json.loads((run.folder / "result.json").read_text())
    return result


def row(framework: str, mixer: str, folder: Path, text: str, steps: int) -> dict[str, Any]:
    """What a framework does with a mixer. The kill comes after two thirds of the steps, between two checkpoints."""
    begin = time.perf_counter()
    whole, killed = (Run(tuple(mixer.split("+")), folder / name, text, steps) for name in ("whole", "killed"))
    expected = complete(framework, whole)
    codes = finish(start(framework, replace(killed, kill_at=2 * steps // 3)))
    died = -signal.SIGKILL in codes and not (killed.folder / "result.json").exists()
    resumed = complete(framework, killed)
    (_, first), (_, second) = (read_checkpoint(run.folder / "weights.safetensors") for run in (whole, killed))
    command = FORKS.Process(
        target=generate, args=(whole.folder / "weights.safetensors", folder / "generated")
    )
    command.start()
    finish([command])
    return {
        "framework": framework,
        "mixer": mixer,
        "loss": round(expected["loss"], 4),
        "unigram_entropy": round(expected["unigram"], 4),
        "learns": expected["loss"] < expected["unigram"],
        "died_of_sigkill": died,
        "resumed_loss": round(resumed["loss"], 4),
        "same_loss": resumed["loss"] == expected["loss"],
        "same_weights": all(torch.equal(first[name], second[name]) for name in first),
        "same_text": (folder / "generated").read_bytes() == PROMPT + bytes(expected["text"]),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    """Print a row a pair; fail unless all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frameworks", default=",".join(LOOPS))
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument(
        "--data", default=argparse.__file__, help="A text; by default a file of Python's library."
    )
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    frameworks = args.frameworks.split(",")
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, here)
    )  # the server does not have this script's sys.path
    FORKS.set_forkserver_preload(COMMON + [module for f in frameworks for module in IMPORTS.get(f, [])])
    rows = []
    for framework in frameworks:
        for mixer in args.mixers.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(framework, mixer, Path(folder), args.data, args.steps))
            print(rows[-1], flush=True)
    if args.json:
        packages = ("torch", "transformers", "lightning", "torchtitan")
        installed = {found.metadata["Name"] for found in metadata.distributions()}
        versions = {package: metadata.version(package) for package in packages if package in installed}
        head = {
            "date": datetime.date.today().isoformat(),
            "versions": {**versions, "python": platform.python_version()},
        }
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    wrong = [each for each in rows if False in each.values()]
    if wrong:
        raise SystemExit(f"failed: {wrong}")
    print(f"{len(rows)} of {len(rows)} learn, resume to the same bits and generate the same text")


if __name__ == "__main__":
    main()
