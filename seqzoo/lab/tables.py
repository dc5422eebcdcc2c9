"""The tables of the command line. Importing this module imports rich."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.table import Table

import seqzoo
from seqzoo.lab.bench import Figure
from seqzoo.lab.compare import Comparison, Result, by_mixer, spread
from seqzoo.lab.data import NextByte


def comparison_table(comparison: Comparison, task: NextByte, results: Sequence[Result]) -> Table:
    """A row a mixer, then the unigram entropy that each must get below."""
    unigram = task.text.unigram_entropy
    table = Table(
        title=_title(task),
        caption=_caption(comparison, task),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("mixer", no_wrap=True)
    for header in ("params", "state\nbytes", "training\ntokens/s", "decode\ntokens/s", "valid\nbits/byte"):
        table.add_column(header, justify="right", min_width=max(map(len, header.split())))
    table.add_column("below\nunigram", justify="right", no_wrap=True)
    for mixer, runs in by_mixer(results).items():
        table.add_row(
            mixer,
            f"{runs[0].parameters:,}",
            f"{runs[0].state_bytes:,}",
            _figure(runs, lambda run: run.train_tokens_per_second, ",.0f"),
            _figure(runs, lambda run: run.decode_tokens_per_second, ",.0f"),
            _figure(runs, lambda run: run.metric, ".3f"),
            _figure(runs, lambda run: unigram - run.metric, ".3f", deviation=False),
        )
    table.add_section()
    table.add_row("unigram entropy", "", "", "", "", f"{unigram:.3f}", "")
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


def _figure(
    runs: Sequence[Result], of: Callable[[Result], float], form: str, *, deviation: bool = True
) -> str:
    mean, sd = spread([of(run) for run in runs])
    return f"{mean:{form}}" if math.isnan(sd) or not deviation else f"{mean:{form}} ±{sd:{form}}"


def _title(task: NextByte) -> str:
    text = task.text
    return f"{text.name}: {len(text.train):,} bytes to train on, {len(text.valid):,} held out"


def _caption(comparison: Comparison, task: NextByte) -> str:
    training = comparison.training
    seeds = ", ".join(map(str, comparison.seeds))
    threads = torch.get_num_threads()
    machine = (
        comparison.device if comparison.device != "cpu" else f"cpu, {threads} thread{'s' * (threads > 1)}"
    )
    return (
        f"{comparison.depth} layers of width {comparison.dim}; {training.steps} steps of {training.batch_size} × "
        f"{task.seq_len} bytes; lr {training.lr:g}; seed {seeds}.\n"
        f"State: per sequence, after {task.seq_len} tokens. Decoding: one sequence, {task.seq_len} tokens.\n"
        f"Speeds: {machine}."
    )
