"""The command ``seqzoo train``."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from seqzoo.lab.errors import LabError
from seqzoo.lab.machine import find_device, set_threads
from seqzoo.lab.options import parse_option
from seqzoo.lab.processes import join_processes
from seqzoo.lab.train import PRECISIONS, TrainConfig

DEFAULT = "DEFAULT"  # where the value of an option comes from that was not given


def train(
    context: typer.Context,
    mixers: Annotated[
        str | None,
        typer.Argument(
            metavar="MIXER[,MIXER...]",
            help="A mixer, or a pattern that repeats over the layers; 'package.module:Class' is your own.",
        ),
    ] = None,
    option: Annotated[
        list[str],
        typer.Option(help="An option of the mixers, such as num_heads=2; may be given several times."),
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run [default: runs/ and the mixers' names].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out, with its options.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    data: Annotated[
        str | None, typer.Option(help="A file or a folder of text [default: Python's own library source].")
    ] = None,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    depth: Annotated[int, typer.Option(help="Layers.")] = 2,
    dropout: Annotated[float, typer.Option(help="Of each branch and the embedding.")] = 0.0,
    seq_len: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 128,
    batch_size: Annotated[
        int, typer.Option(help="Sequences in a step, over all processes.")
    ] = TrainConfig.batch_size,
    accumulate: Annotated[
        int, typer.Option(help="Parts that a step is taken in, to save memory.")
    ] = TrainConfig.accumulate,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1000,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = TrainConfig.lr,
    warmup: Annotated[float, typer.Option(help="Share of the steps that lr rises in.")] = TrainConfig.warmup,
    final_lr: Annotated[
        float, typer.Option(help="Share of lr that the cosine ends at.")
    ] = TrainConfig.final_lr,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = TrainConfig.weight_decay,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = TrainConfig.clip,
    evaluations: Annotated[int, typer.Option(help="Evaluations over the run.")] = TrainConfig.evaluations,
    precision: Annotated[
        str, typer.Option(help=f"{' or '.join(PRECISIONS)}; auto is bfloat16 on a GPU.")
    ] = "auto",
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep, the newest ones.")] = 3,
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to torch.")] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Train a model of bytes, with checkpoints to resume from or to generate with.

    `torchrun --nproc-per-node 2 -m seqzoo train ...` shares each step among processes.
    """
    from seqzoo.lab.folder import CONFIG
    from seqzoo.lab.progress import RunProgress
    from seqzoo.lab.training import RunConfig, resumed_config, train_model

    if resume and overwrite:
        raise LabError("resume: a run cannot be overwritten as well")
    sys.path.insert(0, "")  # as `python -m` does: the user's own package.module
    device = find_device(device)
    options = {field.name for field in fields(RunConfig)} & context.params.keys()
    given: dict[str, Any] = {name: context.params[name] for name in options if _is_given(context, name)}
    if mixers is not None:
        given["mixers"] = tuple(name.strip() for name in re.split("[,+]", mixers) if name.strip())
    if option:
        given["options"] = dict(parse_option(text) for text in option)
    if data is not None:
        given["data"] = str(Path(data).resolve())
    if out is None:
        if mixers is None:
            raise LabError(
                "train: expected a mixer, such as hgrn2, or with --resume the run's folder as --out"
            )
        out = Path("runs") / re.sub(r"[^\w.+-]+", "-", "+".join(given["mixers"]))
    if resume and (out / CONFIG).exists():
        if given.get("precision") == "auto":
            del given["precision"]
        config = resumed_config(out, given)
    else:
        if mixers is None:
            raise LabError(f"train: expected a mixer, such as hgrn2: there is no run in {out} to resume")
        if precision == "auto":
            given["precision"] = "bfloat16" if device.startswith("cuda") else "float32"
        config = RunConfig(**given)
    set_threads(config.threads)
    with join_processes(device) as processes:
        title = ",".join(config.mixers)
        progress = RunProgress(title, config, "bits_per_byte")
        with progress if processes.first else nullcontext():
            trained = train_model(
                config,
                out,
                resume=resume,
                overwrite=overwrite,
                device=processes.local_device(device),
                processes=processes,
                on_step=progress.on_step if processes.first else lambda step: None,
            )
        if processes.first:
            progress.line(
                f"{title}: {progress.metric_name} {trained.metric:.3f} after {config.steps:,} steps "
                f"({trained.seconds:.0f} s), {trained.parameters:,} parameters"
            )
            typer.echo(trained.checkpoint)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != DEFAULT
