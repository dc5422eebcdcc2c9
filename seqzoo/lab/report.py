"""The report of comparisons: read what they left in their folders, put it on one page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seqzoo.lab.compare import Spread, spread
from seqzoo.lab.errors import LabError
from seqzoo.lab.folder import CONFIG, METRICS

PLACE_AND_SEEDS = (
    "mixers",
    "seeds",
    "contexts",
)  # of a comparison, what may differ between runs of one setting


class Evaluation(NamedTuple):
    """The validation metric at one moment of a run."""

    tokens: int
    seconds: float
    metric: float


@dataclass(frozen=True)
class Folder:
    """What a comparison left behind."""

    path: Path
    config: Mapping[str, Any]
    curves: Mapping[tuple[str, int], Sequence[Evaluation]]  # by mixer and seed
    results: Mapping[tuple[str, int], Mapping[str, Any]]  # of the runs that were finished

    @property
    def mixers(self) -> list[str]:
        """Those that have a finished run, in the order in which they came."""
        return list(dict.fromkeys(mixer for mixer, _ in self.results))


@dataclass(frozen=True)
class Group:
    """The finished runs of one mixer at one setting, which differ in their seeds alone: a row, a line, a bar."""

    label: str
    curves: Sequence[Sequence[Evaluation]]
    results: Sequence[Mapping[str, Any]]

    def spread(self, quantity: str) -> Spread | None:
        """Mean and sd over the seeds of what a result holds; None where it holds nothing."""
        values = [result[quantity] for result in self.results if result[quantity] is not None]
        return spread(values) if values else None

    def at_contexts(self, quantity: str) -> list[tuple[int, Spread]]:
        """Mean and sd over the seeds at each context length that all of them measured."""
        rows = [{row["context"]: row[quantity] for row in result["contexts"]} for result in self.results]
        contexts = sorted(set.intersection(*(set(row) for row in rows)))
        return [(context, spread([row[context] for row in rows])) for context in contexts]

    def against(self, x: str) -> list[tuple[float, Spread]]:
        """The mean of x, "tokens" or "seconds", and the metric's mean and sd, at each evaluation that all seeds reached."""
        return [
            (spread([getattr(e, x) for e in moment]).mean, spread([e.metric for e in moment]))
            for moment in zip(*self.curves, strict=False)
        ]


@dataclass(frozen=True)
class Section:
    """All that was found on one task."""

    task: Mapping[str, Any]
    folders: Sequence[Folder]
    groups: Sequence[Group]

    @property
    def metric(self) -> str:
        """Its registered name, such as "bits_per_byte"."""
        return str(self.task["metric"])


def write_report(folders: Sequence[str | Path], out: str | Path) -> None:
    """Write the page of the comparisons in ``folders``; it is there whole or not at all. Raises LabError or OSError."""
    from seqzoo.lab.page import page

    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page(sections([read_folder(folder) for folder in folders])), encoding="utf-8")
    os.replace(partial, out)


def read_folder(path: str | Path) -> Folder:
    """What ``seqzoo compare --out`` left in a folder. The last line of a run that was killed may be half there."""
    path = Path(path)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        lines = (path / METRICS).read_text(encoding="utf-8").split("\n")
        metric = config["task"]["metric"]
        config["comparison"], config["models"], config["environment"]
        events = [json.loads(line) for line in lines[:-1]]
        curves: dict[tuple[str, int], list[Evaluation]] = {}
        results = {}
        for event in events:
            run = event["mixer"], event["seed"]
            if event["event"] == "result":
                results[run] = {**event, "metric": event[metric]}
            elif event[metric] is not None:
                curves.setdefault(run, []).append(
                    Evaluation(event["tokens"], event["seconds"], event[metric])
                )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LabError(f"report: {path} has no {CONFIG} and {METRICS} of seqzoo compare --out") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"report: {path} was not written by this version of seqzoo compare ({error!r})"
        ) from error
    if not results:
        raise LabError(f"report: {path} holds no finished run")
    return Folder(path, config, curves, results)


def sections(folders: Sequence[Folder]) -> list[Section]:
    """The folders by task, in the order in which the tasks came. A folder named twice counts once."""
    folders = list({folder.path.resolve(): folder for folder in folders}.values())
    by_task: dict[str, list[Folder]] = {}
    for folder in folders:
        by_task.setdefault(json.dumps(folder.config["task"], sort_keys=True), []).append(folder)
    return [Section(some[0].config["task"], some, _groups(some)) for some in by_task.values()]


def _groups(folders: Sequence[Folder]) -> list[Group]:
    """A group a mixer; where its settings differ between folders or a seed was run twice, one a mixer and folder."""
    groups = []
    for mixer in dict.fromkeys(mixer for folder in folders for mixer in folder.mixers):
        having = [folder for folder in folders if mixer in folder.mixers]
        runs = [run for folder in having for run in folder.results if run[0] == mixer]
        if len({_setting(folder, mixer) for folder in having}) == 1 and len(set(runs)) == len(runs):
            groups.append(_group(mixer, mixer, having))
        else:
            names = _names(having)
            groups += [
                _group(f"{mixer} ({name})", mixer, [folder])
                for name, folder in zip(names, having, strict=True)
            ]
    return groups


def _group(label: str, mixer: str, folders: Sequence[Folder]) -> Group:
    runs = [(folder, run) for folder in folders for run in folder.results if run[0] == mixer]
    return Group(
        label,
        [folder.curves.get(run, ()) for folder, run in runs],
        [folder.results[run] for folder, run in runs],
    )


def _setting(folder: Folder, mixer: str) -> str:
    """All that decides a run of a mixer but its seed."""
    comparison = {k: v for k, v in folder.config["comparison"].items() if k not in PLACE_AND_SEEDS}
    return json.dumps([comparison, folder.config["models"][mixer]], sort_keys=True)


def _names(folders: Sequence[Folder]) -> list[str]:
    """The folders' names, or their paths where two have the same name."""
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
