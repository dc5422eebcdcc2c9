"""The tables of the command line. Importing this module imports rich."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

import seqzoo
from seqzoo.lab.bench import Figure
from seqzoo.lab.compare import Comparison, Result, by_mixer, spread
from seqzoo.lab.data import NextByte
from seqzoo.lab.tasks import TaskInfo
from seqzoo.lab.train import Task

SHORT_NAMES = {"bits_per_byte": "bits/byte", "bits_per_token": "bits/token"}


def comparison_table(comparison: Comparison, task: Task, results: Sequence[Result]) -> Table:
    """A row a mixer; for text, then the unigram entropy that each must get below."""
    unigram = task.text.unigram_entropy if isinstance(task, NextByte) else None
    table = Table(
        title=_title(task),
        caption=_caption(comparison, task),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("mixer", no_wrap=True)
    metric = SHORT_NAMES.get(task.metric_name, task.metric_name.replace("_", " "))
    for header in ("params", "state\nbytes", "training\ntokens/s", "decode\ntokens/s", f"valid\n{metric}"):
        table.add_column(header, justify="right", min_width=max(map(len, header.split())))
    if unigram is not None:
        table.add_column("below\nunigram", justify="right", no_wrap=True)
    for mixer, runs in by_mixer(results).items():
        table.add_row(
            mixer,
            f"{runs[0].parameters:,}",
            "none" if runs[0].state_bytes is None else f"{runs[0].state_bytes:,}",
            _figure([run.train_tokens_per_second for run in runs], ",.0f"),
            _figure([run.decode_tokens_per_second for run in runs], ",.0f"),
            _figure([run.metric for run in runs], ".3f"),
            *([] if unigram is None else [f"{spread([unigram - run.metric for run in runs]).mean:.3f}"]),
        )
    if unigram is not None:
        table.add_section()
        table.add_row("unigram entropy", "", "", "", "", f"{unigram:.3f}", "")
    return table


def tasks_table(infos: Sequence[TaskInfo]) -> Table:
    """A row a task."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("what to learn")
    table.add_column("options")
    for info in infos:
        options = (f"{name}={default}" for name, default in info.options.items())
        table.add_row(info.name, escape(info.summary), escape(" ".join(options)))
    return table


def mixers_table(names: Sequence[str]) -> Table:
    """A row a registered mixer."""
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("name", "op", "state"):
        table.add_column(header, no_wrap=True)
    table.add_column("summary")
    for info in map(seqzoo.mixer_info, names):
        table.add_row(info.name, info.op, info.growth, info.summary)
    return table


def figures_table(figures: Sequence[Figure]) -> Table:
    """A row a measurement."""
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("quantity", "mixer", "code"):
        table.add_column(header, no_wrap=True)
    table.add_column("value", justify="right")
    for figure in sorted(figures, key=lambda f: (f.quantity, f.mixer)):
        table.add_row(figure.quantity, figure.mixer, figure.code, f"{figure.value:,.1f}")
    return table


def _figure(values: Sequence[float | None], form: str) -> str:
    """Mean ± sd, or only the mean of one value; "none" where there is nothing to measure."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "none"
    mean, sd = spread(measured)
    return f"{mean:{form}}" if math.isnan(sd) else f"{mean:{form}} ±{sd:{form}}"


def _title(task: Task) -> str:
    if isinstance(task, NextByte):
        text = task.text
        return escape(f"{text.name}: {len(text.train):,} bytes to train on, {len(text.valid):,} held out")
    record = task.describe()
    options = ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("name", "sha256"))
    return escape(f"{record['name']}: {options}")


def _caption(comparison: Comparison, task: Task) -> str:
    training = comparison.training
    seeds = ", ".join(map(str, comparison.seeds))
    threads = torch.get_num_threads()
    machine = (
        comparison.device if comparison.device != "cpu" else f"cpu, {threads} thread{'s' * (threads > 1)}"
    )
    unit = "bytes" if isinstance(task, NextByte) else "tokens"
    return (
        f"{comparison.depth} layers of width {comparison.dim}; {training.steps} steps of {training.batch_size} × "
        f"{task.seq_len} {unit}; lr {training.lr:g}; seed {seeds}.\n"
        f"State: per sequence, after {task.seq_len} tokens. Decoding: one sequence, {task.seq_len} tokens.\n"
        f"Speeds: {machine}."
    )
