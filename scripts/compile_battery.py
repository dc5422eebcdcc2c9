"""Compile every registered mixer with Inductor, forward and backward, and compare with eager; too slow for CI.

    python scripts/compile_battery.py [--json FILE]

For a first T of 3, 33 and 50 each: `torch.compile(fullgraph=True, dynamic=True)`, then other lengths, which must not compile
again after the second one.
"""

import argparse
import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import seqzoo

FIRST = (3, 33, 50)
OTHERS = (50, 7, 64, 65, 100)


def results(run: Any, mixer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    y, _ = run(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in mixer.parameters() if p.grad is not None)]


def check(name: str, first: int) -> dict[str, Any]:
    """One row: seconds of the first call, the largest difference relative to its tensor, new compilations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, 32)
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True)
    error, graphs, seconds = 0.0, [], 0.0
    start = time.perf_counter()
    for length in (first, *OTHERS):
        x = torch.randn(2, length, 32)
        got = results(compiled, mixer, x)
        seconds = seconds or time.perf_counter() - start
        want = results(mixer, mixer, x)
        error = max(
            error, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {
        "mixer": name,
        "first_T": first,
        "seconds_to_first": round(seconds, 1),
        "error": error,
        "graphs_after_each_length": graphs,
    }


def main() -> None:
    """Print a row a mixer and first length; fail on a wrong result or on a third graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in seqzoo.list_mixers():
        for first in FIRST:
            rows.append(check(name, first))
            print(rows[-1], flush=True)
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        record = {"date": datetime.date.today().isoformat(), "versions": versions, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    bad = [row for row in rows if row["error"] > 1e-4 or row["graphs_after_each_length"][-1] > 2]
    if bad:
        raise SystemExit(f"failed: {bad}")


if __name__ == "__main__":
    main()
