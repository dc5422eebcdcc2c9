"""Train with torchtitan on GPUs: each mixer learns, goes on after a SIGKILL, and its checkpoint is read by one process.

    python scripts/gpu_torchtitan.py [--gpus 1] [--mixers hgrn2,lru] [--steps 300] [--json FILE] [--more --compile.enable]

What torchtitan needs comes with `pip install -e ".[torchtitan]"`. A row a mixer: the losses, the validation loss beside the
unigram entropy, how far the resumed run ends from the undisturbed one, and what `seqzoo generate`'s code writes.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MIXERS = "hgrn2,hgru,gla,lru,attention,hgrn2+attention"
LENGTH, BATCH = 512, 8
STEP = re.compile(r"step: +(\d+) .*?loss: +([\d.]+).*?tps: +([\d,]+)")


def train(mixer: str, folder: Path, args: Any, kill_at: int = 0) -> tuple[dict[int, float], list[int]]:
    """Losses and tokens a second by step; the whole group of processes is killed once it has made `kill_at` steps."""
    command = [
        sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node".split(), str(args.gpus),
        *"-m seqzoo_plugins.torchtitan --metrics.log_freq 10 --debug.seed 0 --config".split(), mixer,
        "--dump_folder", str(folder), "--training.steps", str(args.steps), "--training.seq_len", str(LENGTH),
        "--training.local_batch_size", str(BATCH // args.gpus), "--checkpoint.interval", str(args.steps // 4), *args.more,
    ]  # fmt: skip
    environment = {**os.environ, "WANDB_MODE": "disabled", "NO_COLOR": "1"}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    losses, speeds, lines = {}, [], []
    for line in child.stdout or ():
        lines.append(line)
        if found := STEP.search(re.sub(r"\x1b\[[0-9;]*m", "", line)):
            losses[int(found[1])] = float(found[2])
            speeds.append(int(found[3].replace(",", "")))
            if kill_at and int(found[1]) >= kill_at:
                kill(child.pid)
                break
    code = child.wait()
    if code and not kill_at:
        raise SystemExit("".join(lines[-60:]))
    return losses, speeds


def kill(launcher: int) -> None:
    """SIGKILL for torchrun and the processes that it started."""
    workers = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for process in (launcher, *map(int, workers)):
        os.kill(process, signal.SIGKILL)


@torch.no_grad()
def row(mixer: str, folder: Path, args: Any) -> dict[str, Any]:
    """What torchtitan does with a mixer."""
    from seqzoo.lab.data import NextByte, load_text
    from seqzoo_plugins.torchtitan import load_model
    from seqzoo_plugins.torchtitan.config_registry import configuration

    begin = time.perf_counter()
    whole, speeds = train(mixer, folder / "whole", args)
    train(mixer, folder / "killed", args, kill_at=2 * args.steps // 3)
    resumed, _ = train(mixer, folder / "killed", args)
    spec = configuration(mixer.split("+")).model_spec
    assert spec is not None
    models = [
        load_model(folder / name / "checkpoint" / f"step-{args.steps}", spec.model).cuda()  # type: ignore[arg-type]
        for name in ("whole", "killed")
    ]
    task = NextByte(load_text(None, LENGTH), LENGTH, valid_windows=64)
    nats = []
    for inputs, targets in task.valid_batches(16):
        logits = models[0](inputs.cuda())[0].float()
        nats.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.cuda().flatten()).item())
    text = models[0].generate(torch.tensor([list(b"def ")], device="cuda"), 64, temperature=0).tokens[0]
    bits = sum(nats) / len(nats) / math.log(2)
    last, again = whole[args.steps], resumed[args.steps]
    first_resumed = min(resumed)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return {
        "mixer": mixer,
        "first_loss": whole[min(whole)],
        "last_loss": last,
        "valid_bits": round(bits, 4),
        "unigram_bits": round(task.text.unigram_entropy, 4),
        "learns": bits < task.text.unigram_entropy,
        "resumed_at": first_resumed,
        "went_on": first_resumed > args.steps // 4,
        "resumed_last_loss": again,
        "same_loss": abs(again - last) < 0.01,  # atomic sums of a GPU come in any order
        "same_weights": all(torch.equal(a, b) for a, b in pairs),
        "tokens_per_second": max(speeds),
        "text": bytes(text.tolist()).decode(errors="replace"),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    """Print a row a mixer; fail unless each learns and goes on to the same loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--mixers", default=MIXERS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--more", nargs=argparse.REMAINDER, default=[], help="For torchtitan, such as --compile.enable."
    )
    args = parser.parse_args()
    rows = []
    for mixer in args.mixers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(mixer, Path(folder), args))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        import torchtitan

        head = {
            "torch": torch.__version__, "torchtitan": torchtitan.__version__, "gpu": torch.cuda.get_device_name(),
            "gpus": args.gpus, "steps": args.steps, "sequences": BATCH, "length": LENGTH, "more": args.more,
        }  # fmt: skip
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    wrong = [each["mixer"] for each in rows if not (each["learns"] and each["went_on"] and each["same_loss"])]
    if wrong:
        raise SystemExit(f"failed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
