"""What only a GPU shows, in a round of limited time: checks and cold compilations side by side, then timings one by one.

    python scripts/gpu_round.py FOLDER [--minutes 9] [--busy 4] [--parts checks,scan,...]

Each part leaves FOLDER/<part>.json, written as it goes, and its log. Compiling what a peer tunes takes minutes and is done in
the first, busy minutes, into Triton's cache; the quiet part then times it among ours. A part gets the time that is left.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BENCH = ("-m", "seqzoo_kernels.bench")
JOBS = "4"  # processes of each of the checks
SHAPE = "[8, 2048, 16, 128"  # of heads, at which peers are compared
BUSY: dict[str, Sequence[str]] = {
    **{
        f"warm-{kind}": (*BENCH, "gated_linear_attention", "--only", f"{kind} decay {SHAPE}", "--ways", "fla")
        for kind in ("vector", "no", "scalar")
    },
    "warm-forgetting": (*BENCH, "attention", "--only", f"forgetting {SHAPE}", "--ways", "fla"),
    "warm-layers": ("scripts/gpu_layers.py", "--only", "fla"),
    "check": ("scripts/gpu_check.py", "--jobs", JOBS),
    "checks-scan": ("scripts/gpu_scan.py", "--only", "checks", "--jobs", JOBS),
    "checks-gla": ("scripts/gpu_gla.py", "--only", "checks,large", "--jobs", JOBS),
    "checks-attention": ("scripts/gpu_attention.py", "--only", "checks", "--jobs", JOBS),
    "checks-norms": ("scripts/gpu_norms.py", "--only", "checks", "--jobs", JOBS),
    "checks-gates": ("scripts/gpu_gates.py", "--only", "checks", "--jobs", JOBS),
}
PEERS = ("--ways", "ours", "--ways", "fla", "--ways", "scalar", "--ways", "complex", "--ways", "flex")
QUIET: dict[str, Sequence[str]] = {
    "scan": (*BENCH, "linear_scan", "--only", "2048, 2048]", "--only", "[1, 16384, 2048]", *PEERS),
    "forgetting": (*BENCH, "attention", "--only", "forgetting [8", "--only", "forgetting [1, 16384", *PEERS),
    "layers": ("scripts/gpu_layers.py", "--seconds", "90"),
    "gla": (*BENCH, "gated_linear_attention", "--only", f"no decay {SHAPE}", "--only", f"scalar decay {SHAPE}", "--only",
            f"vector decay {SHAPE}", *PEERS),
    "softmax": (*BENCH, "attention", "--only", "softmax", "--ways", "ours", "--ways", "SDPA"),
    "pruning": (*BENCH, "attention", "--only", "decay times", "--ways", "ours"),
    "scan-over-T": (*BENCH, "linear_scan", "--only", "over T", *PEERS),
    "gla-over-T": (*BENCH, "gated_linear_attention", "--only", "over T", *PEERS),
    "attention-over-T": (*BENCH, "attention", "--only", "over T", *PEERS),
    "gates": ("scripts/gpu_gates.py", "--only", "speed"),
    "norms": ("scripts/gpu_norms.py", "--only", "speed,tiles"),
}  # fmt: skip


def begin(folder: Path, part: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    json = () if part.startswith("warm-") else ("--json", str(folder / f"{part}.json"))
    with (folder / f"{part}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, *command, *json], stdout=log, stderr=subprocess.STDOUT)


def finish(part: str, running: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait that long, then end it, and say how it went."""
    try:
        code = running.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        running.terminate()
        running.wait()
        print(f"{part}: ended, not done in time", flush=True)
        return
    print(f"{part}: {'done' if code == 0 else f'exit {code}'}", flush=True)


def main() -> None:
    """Run the busy parts together until they are done or out of time, then the quiet ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9, help="of the whole round")
    parser.add_argument("--busy", type=float, default=4, help="minutes of the part side by side, at most")
    parser.add_argument("--parts", default=",".join([*BUSY, *QUIET]), help="names, or how they begin")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    start, chosen = time.monotonic(), tuple(args.parts.split(","))

    def left(minutes: float) -> float:
        return 60 * minutes - (time.monotonic() - start)

    busy = {part: begin(args.folder, part, c) for part, c in BUSY.items() if part.startswith(chosen)}
    for part, running in busy.items():
        finish(part, running, left(args.busy))
    for part, command in QUIET.items():
        if part.startswith(chosen) and left(args.minutes) > 1:
            finish(part, begin(args.folder, part, command), left(args.minutes))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
