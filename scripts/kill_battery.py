"""Kill a training run at random moments, resume it each time, and compare it with one that ran undisturbed.

    python scripts/kill_battery.py [--kills 20] [--mixers hgrn2,attention] [--device cpu] [--json FILE]

After each kill every finished checkpoint must be whole and none lost. At the end all metrics of all steps,
and every tensor of the last checkpoint, must be those of the undisturbed run, bit for bit.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import platform
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from seqzoo.cli import main as main_of_seqzoo
from seqzoo.lab.checkpoint import Checkpoints, read_checkpoint
from seqzoo.lab.errors import LabError

SIZE = "--dim 32 --depth 2 --seq-len 32 --batch-size 4 --dropout 0.1 --checkpoint-every 2".split()
KEEP = 3
PROCESSES = multiprocessing.get_context("forkserver")  # a child starts with everything imported
PROCESSES.set_forkserver_preload(
    ["seqzoo.lab.training", "seqzoo.lab.commands", "seqzoo.lab.metrics", "torch._dynamo"]
)


def run(arguments: list[str], log: Path) -> None:
    """The command line, in a process of its own."""
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main_of_seqzoo(arguments)


def start(out: Path, mixers: str, steps: int, data: Path, *more: str) -> BaseProcess:
    """A training run in a process of its own."""
    numbers = ["--steps", str(steps), "--keep", str(KEEP), "--out", str(out), "--data", str(data)]
    arguments = ["train", mixers, *SIZE, *numbers, *more]
    child = PROCESSES.Process(target=run, args=(arguments, out.with_suffix(".log")))
    child.start()
    return child


def finish(child: BaseProcess, out: Path) -> None:
    """Wait for a run that nobody disturbs."""
    child.join()
    if child.exitcode:
        raise SystemExit(f"the run failed: {out.with_suffix('.log').read_text()}")


def steps_logged(out: Path) -> int:
    """Whole lines of metrics so far."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def opened(out: Path) -> int:
    """When a run has opened its folder, and cut its metrics to its checkpoint."""
    config = out / "config.json"
    return config.stat().st_mtime_ns if config.exists() else 0


def kill_once(child: BaseProcess, out: Path, steps: int, seconds: float) -> bool:
    """Kill a run some seconds after it has made some steps of its own; False if it ended before."""
    before, goal = opened(out), newest(out) + steps
    while steps and child.is_alive() and (opened(out) == before or steps_logged(out) < goal):
        time.sleep(0.001)
    time.sleep(seconds)
    alive = child.is_alive()
    child.kill()
    child.join()
    return alive and child.exitcode == -signal.SIGKILL


def newest(out: Path) -> int:
    """The step of the newest finished checkpoint; 0 if there is none."""
    path = Checkpoints(out / "checkpoints", KEEP).newest()
    return int(path.stem.removeprefix("step-")) if path else 0


def checkpoints_whole(out: Path) -> bool:
    """Whether every finished checkpoint can be read."""
    try:
        return all(read_checkpoint(path)[1] for path in Checkpoints(out / "checkpoints", KEEP).paths())
    except LabError:
        return False


def metrics(out: Path) -> list[dict[str, Any]]:
    """What was logged, but for the times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "checkpoint")} for line in lines]


def same_tensors(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same bits."""
    (_, first), (_, second) = (
        read_checkpoint(Checkpoints(out / "checkpoints", KEEP).paths()[-1]) for out in (one, other)
    )
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def battery(folder: Path, mixers: str, device: str, kills: int, seed: int) -> dict[str, Any]:
    """The figures of a battery."""
    data = folder / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    moments = random.Random(seed)
    steps = 12 * kills
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    finish(start(undisturbed, mixers, steps, data, "--device", device), undisturbed)
    rows: list[dict[str, Any]] = []
    while len(rows) < kills:
        # one in five while it starts, the others some steps later
        late = moments.random() > 0.2
        own, seconds = (moments.randint(1, 8), 0.03) if late else (0, 0.1)
        before = newest(killed)
        child = start(killed, mixers, steps, data, "--device", device, "--resume")
        if not kill_once(child, killed, own, moments.uniform(0, seconds)):
            break
        after, whole = newest(killed), checkpoints_whole(killed)
        partial = bool(list(killed.rglob("*.partial")))
        rows.append({"step": after, "none_lost": whole and after >= before, "while_writing": partial})
        print(rows[-1], flush=True)
    finish(start(killed, mixers, steps, data, "--device", device, "--resume"), killed)
    return {
        "kills": len(rows),
        "none_lost": sum(row["none_lost"] for row in rows),
        "while_writing": sum(row["while_writing"] for row in rows),
        "same_metrics": metrics(killed) == metrics(undisturbed),
        "same_tensors": same_tensors(killed, undisturbed),
        "final_loss": metrics(killed)[-2]["loss"],
        "undisturbed_final_loss": metrics(undisturbed)[-2]["loss"],
        "rows": rows,
    }


def main() -> None:
    """Print a row a kill; fail unless all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mixers", default="hgrn2,attention")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = battery(Path(folder), args.mixers, args.device, args.kills, args.seed)
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        head = {"date": datetime.date.today().isoformat(), "versions": versions}
        head = {**head, "mixers": args.mixers, "device": args.device}
        args.json.write_text(json.dumps({**head, **figures}, indent=1) + "\n")
    good = figures["same_metrics"] and figures["same_tensors"] and figures["none_lost"] == figures["kills"]
    if not (good and figures["kills"] == args.kills):
        raise SystemExit(f"failed: {figures}")
    print(f"{args.kills} of {args.kills} kills resumed to the same bits")


if __name__ == "__main__":
    main()
