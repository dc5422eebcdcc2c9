"""The folder of a comparison as one small file to keep: means, deviations and learning curves.

    seqzoo compare --mixers hgru,hgrn2 --out RUN
    python scripts/condense_comparison.py RUN FILE.json [--note TEXT]

Speeds are left out, for they hold for one machine at one time; the rest is the same everywhere, up to rounding. Fails
if a run is missing or diverged: each must end, finite, below the unigram entropy of its text, where it has one.
"""

import argparse
import datetime
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from seqzoo.lab.folder import CONFIG, METRICS


def condense(folder: Path) -> dict[str, Any]:
    """Settings, versions, and for each mixer its sizes, the metric and the curve of each seed."""
    config = json.loads((folder / CONFIG).read_text())
    comparison, task = config["comparison"], config["task"]
    metric = task["metric"]
    curves: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    ends: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (folder / METRICS).read_text().splitlines():
        row = json.loads(line)
        run = (row["mixer"], row["seed"])
        if row["event"] == "result":
            ends[run] = row
        elif row[metric] is not None:
            curves[run].append([row["step"], round(row[metric], 4)])
    mixers = {}
    for name in comparison["mixers"]:
        missing = [seed for seed in comparison["seeds"] if (name, seed) not in ends]
        if missing:
            raise SystemExit(f"{name}: no result of seed {', '.join(map(str, missing))}")
        runs = [ends[name, seed] for seed in comparison["seeds"]]
        values = [run[metric] for run in runs]
        bound = task.get("text", {}).get("unigram_entropy", math.inf)
        if not all(math.isfinite(value) and value < bound for value in values):
            raise SystemExit(f"{name}: diverged, with {metric} of {values}")
        mixers[name] = {
            metric: {
                "mean": round(statistics.fmean(values), 4),
                "sd": round(statistics.stdev(values), 4) if len(values) > 1 else None,
                "seeds": {str(run["seed"]): round(run[metric], 4) for run in runs},
            },
            "parameters": runs[0]["parameters"],
            "state_bytes": runs[0]["state_bytes"],
            "state_bytes_at": {str(at["context"]): at["state_bytes"] for at in runs[0]["contexts"]},
            "curves": {str(seed): curves[name, seed] for seed in comparison["seeds"]},
        }
    settings = {name: value for name, value in comparison.items() if name not in ("mixers", "contexts")}
    versions = {name: config["environment"][name] for name in ("seqzoo", "torch", "python")}
    return {
        "date": datetime.date.fromtimestamp((folder / METRICS).stat().st_mtime).isoformat(),
        "versions": versions,
        "settings": settings,
        "task": task,
        "curve": ["step", metric],
        "mixers": mixers,
    }


def main() -> None:
    """Write the file, a mixer a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of seqzoo compare --out")
    parser.add_argument("file", type=Path)
    parser.add_argument("--note", help="to keep in the file")
    args = parser.parse_args()
    record = condense(args.folder)
    mixers = record.pop("mixers")
    if args.note:
        record["note"] = args.note
    head = json.dumps(record, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(mixer)}" for name, mixer in mixers.items())
    args.file.write_text(f'{head},\n "mixers": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
