"""A training run that can be stopped at any moment and goes on where it was."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import seqzoo
from seqzoo.lab.checkpoint import Checkpoints, Record, restore_run
from seqzoo.lab.data import NextByte, load_text
from seqzoo.lab.errors import Interrupted, LabError, asked_by_user
from seqzoo.lab.folder import CONFIG, ResultsFolder
from seqzoo.lab.measure import parameter_count
from seqzoo.lab.processes import ALONE, Processes
from seqzoo.lab.stopping import StopSignals
from seqzoo.lab.train import StepRecord, Task, TrainConfig, Trainer

# What a run that goes on cannot change: the model, and which batch comes at which step.
FIXED = ("mixers", "options", "dim", "depth", "dropout", "seq_len", "batch_size", "seed")


@dataclass(frozen=True)
class RunConfig(TrainConfig):
    """All that decides what a run computes, and how it keeps it."""

    steps: int = 1000
    mixers: tuple[str, ...] = ("hgrn2",)  # repeats over the depth
    options: dict[str, Any] = field(default_factory=dict)  # of each of the mixers
    dim: int = 128
    depth: int = 2
    dropout: float = 0.0
    seq_len: int = 128
    data: str | None = None  # a file or a folder; None: the running Python's own library
    seed: int = 0
    threads: int = 1
    checkpoint_every: int = 100  # steps
    keep: int = 3  # checkpoints

    def __post_init__(self) -> None:
        """Refuse what could not be run."""
        super().__post_init__()
        for name in ("dim", "depth", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not 1 <= len(self.mixers) <= self.depth:
            raise LabError(
                f"mixers: expected 1 to depth={self.depth}, got {', '.join(self.mixers) or 'none'}"
            )
        if not 0 <= self.seed < 2**32:
            raise LabError(f"seed: expected 0 or more, below 2**32, got {self.seed}")
        if not 0 <= self.dropout < 1:
            raise LabError(f"dropout: expected 0 or more, below 1, got {self.dropout}")


@dataclass(frozen=True)
class Trained:
    """What a finished run leaves."""

    checkpoint: Path
    metric: float  # of the last evaluation
    seconds: float  # of training steps, those before a resumption too
    parameters: int


def train_model(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    processes: Processes = ALONE,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> Trained:
    """Train a language model, leaving config.json, metrics.jsonl and checkpoints/ in ``out``.

    With ``resume`` it goes on from the newest checkpoint there, or from the start if there is none yet.
    Stopped by SIGINT or SIGTERM it writes a checkpoint and raises Interrupted. Raises LabError for whatever
    cannot be done, after which the checkpoints written so far are as they were.
    """
    task = NextByte(load_text(config.data, config.seq_len), config.seq_len)
    task.metric()  # so that a missing torchmetrics shows now
    model = build_model(config, task).to(device)
    trainer = Trainer(model, task, config, seed=config.seed, processes=processes)
    checkpoints = Checkpoints(out / "checkpoints", config.keep)
    if resume and (newest := checkpoints.newest()):
        check_same_data(restore_run(trainer, newest)["task"], task.describe())
    elif processes.size > 1:
        torch.manual_seed(config.seed + processes.rank)  # other units drop out in each
    record: Record = {"run": asdict(config), "model": model.config, "task": task.describe()}

    def open_folder() -> ResultsFolder:
        if not (resume or overwrite) and checkpoints.newest():
            raise LabError(
                f"out: {out} already holds a run: resume it, overwrite it or choose another folder"
            )
        try:
            checkpoints.clear(finished=not resume)
            return ResultsFolder(out, overwrite=overwrite, steps_done=trainer.step if resume else None)
        except OSError as error:
            raise LabError(f"out: {out} could not be written: {error.strerror}") from error

    try:
        with processes.only_first(open_folder) or nullcontext() as folder, StopSignals() as signals:

            def begin() -> None:
                if folder:
                    folder.write_config(record)

            def watch(step: StepRecord) -> None:
                if folder:
                    folder.log("step", step.named(task.metric_name))
                on_step(step)
                signal = processes.most(signals.number)
                if signal or step.step % config.checkpoint_every == 0 or step.step == config.steps:
                    checkpoints.save(trainer, {**record, **position(trainer)})
                if signal and step.step < config.steps:
                    raise Interrupted(f"interrupted after step {step.step} of {config.steps}", signal)

            with processes.together():
                processes.only_first(begin)
                trainer.run(watch)
            ended = Trained(checkpoints.paths()[-1], trainer.metric, trainer.seconds, parameter_count(model))
            if folder:
                folder.log("result", {**asdict(ended), "checkpoint": str(ended.checkpoint)})
    except LabError as error:
        if not processes.first:
            sys.exit(error.status)  # the first process says why
        error.args = (f"{error}; {checkpoints.last_one()}",)
        raise
    return ended


def build_model(config: RunConfig, task: Task) -> seqzoo.LanguageModel:
    """The model before its first step; LabError for a name or a size that cannot be."""
    torch.manual_seed(config.seed)
    with asked_by_user():
        return seqzoo.LanguageModel(
            task.vocab_size,
            config.dim,
            config.depth,
            mixer=[{"name": name, **config.options} for name in config.mixers],
            dropout=config.dropout,
        )


def position(trainer: Trainer) -> Record:
    """How far a run is: the next batch is that of (seed, step)."""
    metric = None if math.isnan(trainer.metric) else trainer.metric
    return {"step": trainer.step, "seconds": trainer.seconds, "metric": metric}


def check_same_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """LabError if a checkpoint has seen other bytes than there are now; where they lie does not matter."""
    old, new = then["text"], now["text"]
    if old["sha256"] != new["sha256"]:
        sizes = [text["train_bytes"] + text["valid_bytes"] for text in (old, new)]
        change = (
            "as long, but other bytes" if sizes[0] == sizes[1] else "{:,} bytes then, {:,} now".format(*sizes)
        )
        raise LabError(f"data: {new['name']} has changed since the checkpoint: {change}")


def resumed_config(out: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of the run in ``out``, with what is given anew; LabError if that cannot change."""
    path = out / CONFIG
    try:
        known = {field.name for field in fields(RunConfig)}
        saved = json.loads(path.read_text(encoding="utf-8"))["run"]
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
        if set(values) != known:
            raise KeyError(", ".join(set(values) ^ known))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"resume: {path} is not of seqzoo train: {error}") from error
    for name in FIXED:
        if given.get(name, values[name]) != values[name]:
            raise LabError(f"resume: {name} is {_shown(values[name])} in {out}, got {_shown(given[name])}")
    if "mixers" not in given and any(":" in name for name in values["mixers"]):
        raise LabError(
            f"resume: {path} names {_shown(values['mixers'])}, and nothing is imported on a file's word: "
            "if you trust that code, name it yourself"
        )
    return RunConfig(**{**values, **given})


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={option}" for name, option in value.items()) or "none"
    return (
        ",".join(map(str, value))
        if isinstance(value, Iterable) and not isinstance(value, str)
        else str(value)
    )
