"""The commands of ``seqzoo``. Importing this module imports typer; ``seqzoo.cli.main`` runs them."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

import seqzoo
from seqzoo.lab.bench import Shape, decode_figures, training_figures
from seqzoo.lab.compare import DEFAULT_MIXERS
from seqzoo.lab.compare_command import compare, report, tasks
from seqzoo.lab.errors import LabError, asked_by_user
from seqzoo.lab.generate_command import generate
from seqzoo.lab.machine import set_threads, versions
from seqzoo.lab.options import parse_option
from seqzoo.lab.train_command import train

app = typer.Typer(
    help="Token mixers, swapped by name.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(compare)
app.command()(report)
app.command()(tasks)
app.command()(train)
app.command()(generate)


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
    from seqzoo.testing import Report
    from seqzoo.testing.kit import check_laws
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
