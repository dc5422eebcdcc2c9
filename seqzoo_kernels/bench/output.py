"""What a bench gives: a table, a JSON with machine, versions and date, and a plot of time over T."""

import datetime
import importlib.metadata
import json
import platform
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .core import BOTH, FORWARD

PACKAGES = ("triton", "fla-core", "accelerated-scan", "xformers")


def print_row(row: dict[str, Any]) -> None:
    """A line for each way: its times, over the target where there is one, its errors and its memory."""
    print(row["case"])
    for place, (name, way) in enumerate(row["ways"].items()):
        text = ""
        for what in (FORWARD, BOTH):
            target = row["target"].get(what) if place == 0 else None
            goal = "" if target is None else f"({target:g})"
            text += f"  {way[what]:9.3f} ms {goal:7}" if what in way else f"  {'':20}"
        for what in ("error", "error of gradients"):
            text += f"  {way[what]:7.1e}" if what in way else f"  {'':7}"
        memory = way.get("peak extra MiB")
        text += f"  {memory:7.0f} MiB" if memory is not None else ""
        text += "".join(f"  {what} {way[what]} s" for what in way if what.startswith("first "))
        text += "".join(f"  {way[why]}" for why in ("why", "why cold") if why in way)
        print(f"    {name:<32}{text}", flush=True)


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The targets that ours did not reach, and ours that were not timed."""
    found = []
    for row in rows:
        ours = next(iter(row["ways"].values()))
        if "why" in ours:
            found.append(f"{row['case']}: {ours['why']}")
        for what, target in row["target"].items():
            if what in ours and ours[what] > target:
                found.append(f"{row['case']}, {what}: {ours[what]:.3f} ms, target {target:g}")
    return found


def write(path: Path, rows: Sequence[dict[str, Any]], device: torch.device, **more: Any) -> None:
    path.write_text(json.dumps({**record(device), **more, "rows": rows}, indent=1) + "\n")


def judged(
    labels: dict[str, Any],
    check: Callable[..., float],
    *given: Any,
    told: str = "share of the allowed error",
    **options: Any,
) -> dict[str, Any]:
    """The row of a check that returns a number or raises: the labels, and that number as `told`, or why it failed and where."""
    try:
        number = float(f"{check(*given, **options):.3g}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}"[:400]
        return {**labels, "passed": False, "why": why, "where": f"{where.name}:{where.lineno}"}
    return {**labels, "passed": True, told: number}


class Log(list[dict[str, Any]]):
    """Rows that are printed, and written to `path`, as they come: whatever ends a run leaves what was found.

    `more` is written beside them, and may grow too.
    """

    def __init__(self, path: Path | None, device: torch.device, **more: Any) -> None:
        super().__init__()
        self.path, self.device, self.more = path, device, more

    def add(self, row: dict[str, Any], where: list[dict[str, Any]] | None = None) -> None:
        """To the rows, or to a list among `more`."""
        (self if where is None else where).append(row)
        print(row, flush=True)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            write(self.path, self, self.device, **self.more)

    def finish(self) -> None:
        """Write, print a summary of the checks, and exit with 1 if any failed."""
        self.save()
        passed = [row["passed"] for row in self if "passed" in row]
        print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
        raise SystemExit(int(not all(passed)))


def record(device: torch.device) -> dict[str, Any]:
    """Date, machine and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"device": name, "threads": torch.get_num_threads(), "platform": platform.machine()},
        "versions": versions,
    }


def plot(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Time over T, a line for each way: the forward pass on the left, both on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted((row for row in rows if row["length"] is not None), key=lambda row: row["length"])
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, what in zip(axes, (FORWARD, BOTH), strict=True):
        for number, name in enumerate(names):
            ways = [(row["length"], row["ways"].get(name, {}).get(what)) for row in rows]
            points = [(length, time) for length, time in ways if time is not None]
            if points:
                style = (
                    {"linestyle": ":", "color": "grey"}
                    if name.startswith(("copy", "product"))
                    else {"marker": "o"}
                )
                width = 2.2 if number == 0 else 1.2
                axis.plot(*zip(*points, strict=True), label=name, markersize=4, linewidth=width, **style)
        lengths = [row["length"] for row in rows]
        axis.set(xscale="log", yscale="log", xlabel="T", title=what)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)
