"""The commands of ``seqzoo``. Importing this module imports typer; ``seqzoo.cli.main`` runs them."""

from __future__ import annotations

import ast
import datetime
import inspect
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import seqzoo
from seqzoo.lab.bench import Shape, decode_figures, training_figures
from seqzoo.lab.compare import DEFAULT_MIXERS, Comparison, Result, compare_mixers
from seqzoo.lab.data import NextByte, load_text
from seqzoo.lab.errors import LabError, asked_by_user
from seqzoo.lab.train import TrainConfig

app = typer.Typer(
    help="Token mixers, swapped by name.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_(
    pattern: Annotated[str, typer.Argument(help="A name with wildcards, such as 'hgr*'.")] = "*",
    op: Annotated[str | None, typer.Option(help="Only mixers of this op.")] = None,
    growth: Annotated[str | None, typer.Option(help="Only mixers whose state grows so.")] = None,
) -> None:
    """List the registered mixers."""
    from seqzoo.lab.progress import console
    from seqzoo.lab.tables import mixers_table

    with asked_by_user():
        names = seqzoo.list_mixers(pattern, op=op, growth=growth)
    if not names:
        raise LabError(f"no such mixer; there are {', '.join(seqzoo.list_mixers())}")
    console().print(mixers_table(names))


@app.command()
def info(name: Annotated[str, typer.Argument(help="A registered mixer.")]) -> None:
    """Say what a mixer is and which options it takes."""
    with asked_by_user():
        record = seqzoo.mixer_info(name)
    facts = {
        "name": record.name,
        "paper": record.paper,
        "class": f"{record.cls.__module__}:{record.cls.__qualname__}",
        "op": record.op,
        "modes": ", ".join(record.modes),
        "state": record.growth,
    }
    for fact, value in facts.items():
        typer.echo(f"{fact:9}{value}")
    for number, (option, default) in enumerate(record.options.items()):
        typer.echo(f"{'' if number else 'options':9}{option} = {default!r}")
    typer.echo(f"\n{inspect.getdoc(record.cls)}")


@app.command()
def compare(
    mixers: Annotated[
        str,
        typer.Option(
            help="Names with commas between; 'a+b' alternates over the layers; 'package.module:Class' is your own."
        ),
    ] = ",".join(DEFAULT_MIXERS),
    data: Annotated[
        Path | None, typer.Option(help="A file or a folder of text [default: Python's own library source].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for config.json and metrics.jsonl.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")] = False,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = Comparison.dim,
    depth: Annotated[int, typer.Option(help="Layers.")] = Comparison.depth,
    seq_len: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = TrainConfig.batch_size,
    steps: Annotated[int, typer.Option(help="Training steps of each mixer.")] = TrainConfig.steps,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = TrainConfig.lr,
    seed: Annotated[int, typer.Option(help="The first seed, of parameters and batches.")] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds to run; figures become mean ± sd.")] = 1,
    threads: Annotated[
        int, typer.Option(help="CPU threads; 0 leaves it to torch, which pays for wide models on idle cores.")
    ] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Train mixers side by side on the same bytes and compare what each costs and reaches."""
    from seqzoo.lab.progress import ComparisonProgress, console
    from seqzoo.lab.tables import comparison_table

    set_threads(threads)
    comparison = Comparison(
        mixers=tuple(name.strip() for name in mixers.split(",") if name.strip()),
        dim=dim,
        depth=depth,
        seeds=tuple(range(seed, seed + seeds)),
        device=find_device(device),
        training=TrainConfig(steps=steps, batch_size=batch_size, lr=lr),
    )
    task = NextByte(load_text(data, seq_len), seq_len)
    results: list[Result] = []
    progress = ComparisonProgress(comparison, task.metric_name)
    try:
        with progress:
            for result in compare_mixers(
                comparison, task, out=out, overwrite=overwrite, on_step=progress.on_step
            ):
                results.append(result)
                progress.on_result(result)
    finally:  # stopped early, the finished runs still count
        if results:
            console().print(comparison_table(comparison, task, results))


@app.command()
def bench(
    mixers: Annotated[str, typer.Option(help="Names with commas between.")] = ",".join(DEFAULT_MIXERS),
    dim: Annotated[int, typer.Option(help="Width of the model.")] = Shape.dim,
    depth: Annotated[int, typer.Option(help="Layers.")] = Shape.depth,
    batch_size: Annotated[int, typer.Option(help="Sequences in a training step.")] = Shape.batch_size,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = Shape.length,
    contexts: Annotated[
        str, typer.Option(help="Context lengths to decode to, with commas between.")
    ] = "256,2048",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to torch.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
) -> None:
    """Time a training step and decoding of each mixer beside the plain code for it."""
    from seqzoo.lab.progress import console
    from seqzoo.lab.tables import figures_table

    set_threads(threads)
    names = [name.strip() for name in mixers.split(",") if name.strip()]
    shape = Shape(dim, depth, batch_size, seq_len)
    lengths = [int(length) for length in contexts.split(",") if length.strip().isdigit()]
    figures = training_figures(names, shape) + decode_figures(names, shape, lengths)
    console().print(figures_table(figures))
    if out is not None:
        record = {"versions": versions(), "threads": torch.get_num_threads(), "shape": asdict(shape)}
        out.write_text(json.dumps({**record, "figures": [asdict(f) for f in figures]}, indent=1) + "\n")


@app.command()
def check(
    mixer: Annotated[
        str, typer.Argument(help="A registered mixer, package.module:Class, or path/to/file.py:Class.")
    ],
    option: Annotated[list[str], typer.Option(help="An option of the mixer, such as num_heads=2.")] = [],  # noqa: B006
    law: Annotated[list[str], typer.Option(help="Only this law; may be given several times.")] = [],  # noqa: B006
    budget: Annotated[str, typer.Option(help="quick, or thorough.")] = "quick",
    seed: Annotated[int, typer.Option(help="Seed of weights, tokens and examples.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to torch.")] = 1,
) -> None:
    """Test a mixer on the laws; the status is 1 if it breaks one."""
    from seqzoo.testing.kit import Report, check_laws
    from seqzoo.testing.subject import subject

    set_threads(threads)
    sys.path.insert(0, "")  # as `python -m` does: the user's own package.module
    with asked_by_user():
        tested = subject(mixer, dict(parse_option(text) for text in option))
        rows = check_laws(tested, laws=law or None, budget=budget, seed=seed)
    report = Report(tested.name, tuple(rows))
    typer.echo(str(report))
    for violation in report.failures:
        typer.echo(f"\n{violation}")
    if report.failures:
        raise typer.Exit(1)


def parse_option(text: str) -> tuple[str, Any]:
    """Name and value of "name=value"; a value that is no Python literal is text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise LabError(f"option: expected name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def set_threads(count: int) -> None:
    """Let torch use ``count`` CPU threads, or with 0 as many as it likes.

    The default is 1: at the default width a second thread gains little, and its waiting costs a lot once the
    cores are shared with anything else.
    """
    if count < 0:
        raise LabError(f"threads: expected 0 or more, got {count}")
    if count:
        torch.set_num_threads(count)


def find_device(name: str) -> str:
    """The device of that name, tried out; for "auto", a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device: {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def versions() -> dict[str, str]:
    """What a figure depends on besides the code."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqzoo": seqzoo.__version__,
        "machine": platform.machine(),
    }
