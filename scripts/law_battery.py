"""Test every registered mixer on the laws, longer than CI can: many seeds, the thorough budget, many draws of law 8.

    python scripts/law_battery.py [--seeds 20] [--minutes 10] [--draws 400] [--mixers PATTERN] [--jobs 1] [--json FILE]

Right mixers must pass, so each failure is a bug or a false alarm. `--minutes` bounds the thorough run of one mixer: after that
nothing more is drawn. A count of 0 leaves that part out. `--jobs` processes share the work.
"""

import argparse
import datetime
import json
import platform
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import seqzoo
from seqzoo.testing import LAWS, OP_LAWS, LawViolation
from seqzoo.testing.kit import check_laws
from seqzoo.testing.op_cases import GATES, VARIANTS
from seqzoo.testing.op_kit import MODES
from seqzoo.testing.subject import subject

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 50, 64, 70)

Record = dict[str, Any]


def laws(name: str, seed: int, budget: str, seconds: float | None = None) -> Record:
    """All laws on one mixer; what broke, in full."""
    start = time.perf_counter()
    rows = list(check_laws(subject(name), budget=budget, seed=seed, seconds=seconds))
    return {
        "mixer": name,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "examples": sum(row.examples for row in rows),
        "failures": [str(row.violation) for row in rows if row.violation is not None],
    }


def draw_of_mixers(i: int, names: list[str]) -> Record:
    """Law 8 on a random case of a right mixer."""
    chance, name = random.Random(i), names[i % len(names)]
    dtype = chance.choice(DTYPES)
    example = {
        "mode": chance.choice(seqzoo.mixer_info(name).modes),
        "dtype": dtype,
        "length": chance.choice(LENGTHS),
        "history": chance.choice((0, 1, 5)),
        "shared": chance.random() < 0.5,
        "scale": chance.choice((1.0, 30.0)) if dtype.itemsize >= 4 else 1.0,  # float16 ends at 65504
        "seed": i,
    }
    return alarm(f"{name}, draw {i}", lambda: LAWS["extremes"](subject(name).make, **example))


def draw_of_ops(i: int) -> Record:
    """Law 8 on a random case of a kernel in plain torch."""
    ops = list(VARIANTS)
    chance, op = random.Random(i), ops[i % len(ops)]
    example = {
        "variant": chance.choice(VARIANTS[op]),
        "mode": chance.choice(MODES),
        "dtype": chance.choice(DTYPES),
        "length": chance.choice(LENGTHS),
        "size": chance.choice((1, 2, 3, 5, 12, 24)),
        "gate": chance.choice(list(GATES)),
        "start": chance.random() < 0.5,
        "gradients": chance.choice(("dense", "strided", "expanded")),
        "seed": i,
    }
    return alarm(f"{op}, draw {i}", lambda: OP_LAWS["extremes"](op, "torch", **example))


def alarm(what: str, check: Any) -> Record:
    try:
        check()
    except LawViolation as violation:
        return {"what": what, "failures": [str(violation)]}
    return {"what": what, "failures": []}


def main() -> None:
    """Run the parts, print a line each, write the record and fail if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the quick budget")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the thorough budget, a mixer")
    parser.add_argument("--draws", type=int, default=400, help="of law 8, of mixers and of ops each")
    parser.add_argument("--mixers", default="*", help="only these, such as 'hgr*,lru'")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name for pattern in args.mixers.split(",") for name in seqzoo.list_mixers(pattern)]
    seconds = 60 * args.minutes
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), torch.set_num_threads, (1,))

    def later(run: Callable[..., Record], *given: Any) -> Future[Record]:
        return pool.submit(run, *given)

    # the longest first
    parts: dict[str, list[Future[Record]]] = {
        "thorough": [later(laws, name, 0, "thorough", seconds) for name in names if seconds],
        "seeds": [later(laws, name, seed, "quick") for seed in range(args.seeds) for name in names],
        "law 8 on mixers": [later(draw_of_mixers, i, names) for i in range(args.draws)],
        "law 8 on ops": [later(draw_of_ops, i) for i in range(args.draws)],
    }
    record: Record = {
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "budget": {name: value for name, value in vars(args).items() if name != "json"},
    }
    failures = []
    for part, results in parts.items():
        done = []
        for result in (future.result() for future in results):
            done.append(result)
            failures += result["failures"]
            for text in result["failures"]:
                print(text, flush=True)
            if "mixer" in result:
                print(part, {name: v for name, v in result.items() if name != "failures"}, flush=True)
        failed = [result for result in done if result["failures"]]
        record[part] = done if done and "mixer" in done[0] else {"cases": len(done), "failed": failed}
        print(f"{part}: {len(done)} runs, {len(failed)} failed", flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
