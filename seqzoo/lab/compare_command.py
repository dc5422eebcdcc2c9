"""The commands ``seqzoo compare``, ``seqzoo tasks`` and ``seqzoo report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from seqzoo.lab.compare import DEFAULT_MIXERS, Result, compare_mixers
from seqzoo.lab.errors import LabError
from seqzoo.lab.folder import REPORT
from seqzoo.lab.machine import find_device, set_threads
from seqzoo.lab.options import parse_option
from seqzoo.lab.train import Task

CONTEXTS = (64, 256, 1024, 4096)


def compare(
    mixers: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between; 'a+b' alternates over the layers; 'package.module:Class' is your own "
            f"[default: {','.join(DEFAULT_MIXERS)}, or the task's]."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="What to learn: seqzoo tasks lists them [default: text].")
    ] = None,
    option: Annotated[list[str], typer.Option(help="An option of the task, such as pairs=8.")] = [],  # noqa: B006
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file or a folder of text, or a .npy file of tokens [default: Python's own library source]."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for {REPORT}, config.json and metrics.jsonl.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
    dim: Annotated[int | None, typer.Option(help="Width of the model [default: 128, or the task's].")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers [default: 2, or the task's].")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence [default: 128, or the task's].")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences in a step [default: 8, or the task's].")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run [default: 250, or the task's].")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate [default: 0.004, or the task's].")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed, of parameters and batches.")] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds to run; figures are mean ± sd.")] = 2,
    threads: Annotated[
        int, typer.Option(help="CPU threads; 0 leaves it to torch, which pays for wide models on idle cores.")
    ] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Train mixers side by side on the same data and compare what each costs and reaches."""
    from seqzoo.lab.progress import ComparisonProgress, console
    from seqzoo.lab.report import write_report
    from seqzoo.lab.tables import comparison_table
    from seqzoo.lab.tasks import create_task, task_info

    set_threads(threads)
    name = task or ("tokens" if data is not None and data.suffix == ".npy" else "text")
    standard = task_info(name).comparison
    names = mixers.split(",") if mixers is not None else standard.mixers
    chosen = {"dim": dim, "depth": depth}
    budget = {"steps": steps, "batch_size": batch_size, "lr": lr}
    comparison = replace(
        standard,
        mixers=tuple(mixer.strip() for mixer in names if mixer.strip()),
        seeds=tuple(range(seed, seed + seeds)),
        device=find_device(device),
        contexts=CONTEXTS if out is not None else (),
        training=replace(standard.training, **_given(budget)),
        **_given(chosen),
    )
    options = dict(parse_option(text) for text in option)
    problem: Task = create_task(name, **{**_given({"seq_len": seq_len, "data": data}), **options})
    results: list[Result] = []
    progress = ComparisonProgress(comparison, problem.metric_name)
    try:
        with progress:
            for result in compare_mixers(
                comparison, problem, out=out, overwrite=overwrite, on_step=progress.on_step
            ):
                results.append(result)
                progress.on_result(result)
    finally:  # stopped early, the finished runs still count
        if results:
            console().print(comparison_table(comparison, problem, results))
            if out is not None:
                write_report([out], out / REPORT)
                console(stderr=True).print(f"report: {out / REPORT}", markup=False, soft_wrap=True)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of seqzoo compare --out.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path(REPORT),
) -> None:
    """Put the results of several comparisons on one page."""
    from seqzoo.lab.report import write_report

    if out.is_dir():
        raise LabError(f"out: {out} is a folder: name a file in it")
    write_report(folders, out)
    typer.echo(out)


def tasks() -> None:
    """List what mixers can be compared on, with the options of each."""
    from seqzoo.lab.progress import console
    from seqzoo.lab.tables import tasks_table
    from seqzoo.lab.tasks import list_tasks, task_info

    console().print(tasks_table([task_info(name) for name in list_tasks()]))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Those that the user chose."""
    return {name: value for name, value in options.items() if value is not None}
