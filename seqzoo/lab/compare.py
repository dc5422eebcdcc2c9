"""The comparison: several mixers, each trained with the same budget on the same batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

import seqzoo
from seqzoo.lab.errors import LabError, asked_by_user
from seqzoo.lab.folder import ResultsFolder
from seqzoo.lab.measure import AtContext, costs_at, decode_speed, parameter_count
from seqzoo.lab.train import StepRecord, Task, TrainConfig, Trainer
from seqzoo.lab.two_ways import TwoWayModel

DEFAULT_MIXERS = ("hgru", "hgrn2", "gla", "lru", "attention")


@dataclass(frozen=True)
class Comparison:
    """What is compared, and what is the same for all: everything but the mixers and the seed.

    Args:
        mixers: names, or names joined by "+" that alternate over the depth: "hgrn2+attention".
        dim: width D.
        depth: number of blocks.
        seeds: each mixer is trained once with each.
        device: "cpu", "cuda", or another of torch's.
        embedding_std: standard deviation of the embedding at the start; None is the model's own.
        contexts: lengths at which memory and decoding speed are measured too.
        training: budget and optimiser.

    Raises:
        LabError: a value is not as above.
    """

    mixers: tuple[str, ...] = DEFAULT_MIXERS
    dim: int = 128
    depth: int = 2
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    embedding_std: float | None = None
    contexts: tuple[int, ...] = ()
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        """Refuse an empty or ambiguous comparison."""
        for name, values in (("mixers", self.mixers), ("seeds", self.seeds)):
            if not values:
                raise LabError(f"{name}: expected at least one")
            if len(set(values)) < len(values):
                raise LabError(f"{name}: each can be named once, got {', '.join(map(str, values))}")
        for name in ("dim", "depth"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not all(context >= 1 for context in self.contexts):
            raise LabError(f"contexts: expected 1 or more, got {', '.join(map(str, self.contexts))}")
        if self.embedding_std is not None and not 0 < self.embedding_std < float("inf"):
            raise LabError(f"embedding_std: expected a number above 0, got {self.embedding_std}")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise LabError(f"seed: expected 0 or more, below 2**32, got {', '.join(map(str, self.seeds))}")

    @property
    def runs(self) -> list[Run]:
        """Every mixer with the first seed, then every mixer with the next: stopped early, it is still fair."""
        return [Run(mixer, seed) for seed in self.seeds for mixer in self.mixers]


class Run(NamedTuple):
    """One model of a comparison."""

    mixer: str
    seed: int


@dataclass(frozen=True)
class Result:
    """What a finished run measured.

    Args:
        mixer: as in the comparison.
        seed: of the run.
        parameters: numbers that training changed.
        state_bytes: of one sequence after seq_len tokens; None if the model reads both ways.
        train_tokens_per_second: of the median step.
        decode_tokens_per_second: of one sequence, greedily; None if the model reads both ways.
        seconds: of the whole run: training, evaluation, decoding.
        metric: of the task, on its validation part.
        contexts: costs at each context of the comparison.
    """

    mixer: str
    seed: int
    parameters: int
    state_bytes: int | None
    train_tokens_per_second: float
    decode_tokens_per_second: float | None
    seconds: float
    metric: float
    contexts: tuple[AtContext, ...] = ()


def compare_mixers(
    comparison: Comparison,
    task: Task,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_step: Callable[[Run, StepRecord], None] = lambda run, record: None,
) -> Iterator[Result]:
    """Train and measure one run after the other, yielding each result when it is there.

    Every model is built once, and the folder opened, before the first step, so that a wrong name or place costs no time.

    Args:
        comparison: what is the same for all, and the mixers.
        task: what is learnt, such as `create_task("mqar")`.
        out: a folder for the configuration and the metrics.
        overwrite: what an earlier comparison left there.
        on_step: called with the run and its record after each step.

    Raises:
        LabError: a mixer, a size or the folder is not as it must be. OSError: of that folder.
    """
    task.metric()  # so that a missing torchmetrics shows now
    models = {mixer: build_model(comparison, task, mixer, seed=0).config for mixer in comparison.mixers}
    with ExitStack() as stack:
        folder = stack.enter_context(ResultsFolder(out, overwrite=overwrite)) if out is not None else None
        if folder:
            folder.write_config(
                {
                    "comparison": asdict(comparison),
                    "models": models,
                    "task": {**task.describe(), "metric": task.metric_name},
                }
            )
        for run in comparison.runs:
            yield _train_and_measure(comparison, task, run, folder, on_step)


def build_model(
    comparison: Comparison, task: Task, mixer: str, *, seed: int
) -> seqzoo.LanguageModel | TwoWayModel:
    """The model of one run, its parameters drawn from ``seed``; LabError for a name or a size that cannot be."""
    pattern = [name.strip() for name in mixer.split("+")]
    if len(pattern) > comparison.depth:
        raise LabError(f"mixers: {mixer!r} needs a depth of {len(pattern)} or more, got {comparison.depth}")
    both_ways = bool(getattr(task, "bidirectional", False))
    if both_ways and comparison.depth < 2:
        raise LabError(f"depth: a model that reads both ways has 2 layers or more, got {comparison.depth}")
    torch.manual_seed(seed)
    with asked_by_user():
        model = seqzoo.LanguageModel(task.vocab_size, comparison.dim, comparison.depth, mixer=pattern)
    if comparison.embedding_std is not None:
        torch.nn.init.normal_(model.embedding.weight, std=comparison.embedding_std)
    model.to(comparison.device)
    return TwoWayModel(model) if both_ways else model


def _train_and_measure(
    comparison: Comparison,
    task: Task,
    run: Run,
    folder: ResultsFolder | None,
    on_step: Callable[[Run, StepRecord], None],
) -> Result:
    """One run from its first step to its result."""

    def log(event: str, values: dict[str, object]) -> None:
        if folder:  # the metric under its own name, for whoever reads the lines without knowing the task
            folder.log(
                event, {task.metric_name if name == "metric" else name: values[name] for name in values}
            )

    def watch(record: StepRecord) -> None:
        log("step", {**run._asdict(), **record._asdict()})
        on_step(run, record)

    start = time.perf_counter()
    model = build_model(comparison, task, run.mixer, seed=run.seed)
    trainer = Trainer(model, task, comparison.training, seed=run.seed)
    try:
        metric = trainer.run(watch)
    except LabError as error:
        raise LabError(f"{run.mixer}: {error}") from error
    decoder = model if isinstance(model, seqzoo.LanguageModel) else None
    result = Result(
        mixer=run.mixer,
        seed=run.seed,
        parameters=parameter_count(model),
        state_bytes=decoder.state_size(task.seq_len) if decoder else None,
        train_tokens_per_second=trainer.tokens_per_second,
        decode_tokens_per_second=decode_speed(decoder, task.seq_len) if decoder else None,
        metric=metric,
        contexts=costs_at(decoder, comparison.contexts) if decoder else (),
        seconds=time.perf_counter() - start,
    )
    log("result", {**asdict(result), "contexts": [costs._asdict() for costs in result.contexts]})
    return result


class Spread(NamedTuple):
    """Mean and standard deviation over the seeds; the deviation is NaN for one seed."""

    mean: float
    sd: float


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))


def by_mixer(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each mixer, in the order in which the mixers came."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.mixer, []).append(result)
    return groups
