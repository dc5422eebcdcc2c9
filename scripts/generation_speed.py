"""Tokens a second of generation against the context already read, for every registered mixer.

    python scripts/generation_speed.py [--contexts 512,2048,8192,32768] [--json FILE] [--plot FILE]

An untrained byte model reads random bytes, in pieces, up to each context, and then generates from there. A
state of constant size gives a constant speed; attention reads a cache that grows.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import seqzoo
from seqzoo.states import map_state

PIECE = 2048  # tokens read at once
WARM_UP = 8  # tokens whose generation is not timed
REPEATS = 3  # of which the fastest counts


@torch.no_grad()
def speeds(
    name: str, contexts: Sequence[int], *, dim: int, depth: int, count: int, device: str
) -> list[dict[str, Any]]:
    """One row a context: tokens a second, of `count` tokens, and the bytes of the state there."""
    torch.manual_seed(0)
    model = seqzoo.LanguageModel(256, dim, depth, mixer=name).to(device).eval()
    tokens = torch.randint(256, (1, max(contexts)), device=device)
    state, read, rows = model.init_state(1), 0, []
    for context in contexts:
        while read < context:
            piece = tokens[:, read : min(context, read + PIECE)]
            _, state = model.backbone(model.embedding(piece), state)
            read += piece.shape[1]
        speed = max(generated_per_second(model, tokens[:, -1:], state, count) for _ in range(REPEATS))
        rows.append({
            "mixer": name, "context": context, "tokens_per_second": round(speed, 1),
            "state_bytes": model.state_size(context),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def generated_per_second(model: seqzoo.LanguageModel, prompt: torch.Tensor, state: Any, count: int) -> float:
    """Speed of `LanguageModel.stream` from a state, once it is warm."""
    start = 0.0
    stream = model.stream(prompt, WARM_UP + count, state=map_state(torch.clone, state), temperature=0)
    for number, token in enumerate(stream, start=1):
        if number == WARM_UP:
            token.tolist()  # waits for the device
            start = time.perf_counter()
    token.tolist()
    return count / (time.perf_counter() - start)


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """A line a mixer; a constant speed is a level one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in dict.fromkeys(row["mixer"] for row in rows):
        points = [(row["context"], row["tokens_per_second"]) for row in rows if row["mixer"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    contexts = sorted({row["context"] for row in rows})
    axes.set(xscale="log", xlabel="tokens of context", ylabel="tokens a second", title=title)
    axes.set_ylim(bottom=0)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()  # those between the contexts
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Print a row a mixer and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default=",".join(seqzoo.list_mixers()))
    parser.add_argument("--contexts", default="512,2048,8192,32768")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contexts = sorted(int(context) for context in args.contexts.split(","))
    size = {"dim": args.dim, "depth": args.depth, "count": args.tokens, "device": args.device}
    rows = [row for name in args.mixers.split(",") for row in speeds(name, contexts, **size)]
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        head = {"date": datetime.date.today().isoformat(), "versions": versions, "threads": args.threads}
        args.json.write_text(json.dumps({**head, **size, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot, f"Generation, width {args.dim}, {args.depth} layers, batch 1 ({args.device})")


if __name__ == "__main__":
    main()
