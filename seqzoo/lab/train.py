"""One training run: the optimiser, the schedule, the steps, the evaluation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqzoo.lab.errors import LabError
from seqzoo.lab.processes import ALONE, Processes, without_averaging
from seqzoo.optim import param_groups

if TYPE_CHECKING:
    from torchmetrics import Metric

PRECISIONS = ("float32", "bfloat16")
NO_TARGET = -100
WARM_UP_TIMINGS = 3  # the first steps allocate and autotune; they do not count towards the speed


class Task(Protocol):
    """What a run needs to know about its data. Targets of −100 do not count."""

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 … vocab_size − 1."""

    @property
    def metric_name(self) -> str:
        """What ``metric`` measures."""

    def train_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] of a step; the same arguments give the same batch."""

    def valid_batches(self, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs and targets [B, T] to evaluate on; the same at each call."""

    def metric(self) -> Metric:
        """A fresh metric that takes logits [B, T, V] and targets [B, T]."""

    def describe(self) -> dict[str, object]:
        """What a configuration file keeps of the task."""


@dataclass(frozen=True)
class TrainConfig:
    """The budget and the optimiser of a run: AdamW with a linear warm-up and a cosine.

    Args:
        steps: optimiser steps.
        batch_size: sequences in a step, over all processes and parts.
        lr: the highest learning rate; a mixer's `param_rule` may scale it.
        warmup: share of the steps.
        final_lr: share of lr that the cosine ends at.
        betas: of AdamW.
        weight_decay: of matrices.
        clip: bound of the gradient's norm.
        evaluations: on the validation part, evenly spread over the run.
        accumulate: parts that a process takes its share of a step in.
        precision: of the products, "float32" or "bfloat16"; parameters, states and sums stay float32.

    Raises:
        LabError: a value is not as above.
    """

    steps: int = 400
    batch_size: int = 8
    lr: float = 4e-3
    warmup: float = 0.1
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 8
    accumulate: int = 1
    precision: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what could not be run."""
        for name in ("steps", "batch_size", "evaluations", "accumulate"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise LabError(f"lr: expected a number above 0, got {self.lr}")
        if self.precision not in PRECISIONS:
            raise LabError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    def lr_at(self, step: int) -> float:
        """Learning rate of step 0, 1, …: linear warm-up, then a cosine."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * done)) / 2)

    def evaluates_after(self, steps: int) -> bool:
        """Whether an evaluation follows when ``steps`` steps are done: evenly spread, and always at the end."""
        return steps * self.evaluations // self.steps > (steps - 1) * self.evaluations // self.steps


class StepRecord(NamedTuple):
    """What is known after a step."""

    step: int  # steps done
    tokens: int  # tokens trained on so far
    seconds: float  # spent on training steps so far, evaluation left out
    loss: float  # nats a token, on this step's batch
    lr: float
    grad_norm: float  # before clipping
    metric: float | None  # the validation metric, after the steps that are followed by an evaluation

    def named(self, metric_name: str) -> dict[str, object]:
        """The values by name, the metric under its own: for whoever reads them without knowing the task."""
        return {metric_name if name == "metric" else name: value for name, value in self._asdict().items()}


class Trainer:
    """A run that goes on from ``step``. Model, optimiser, the random numbers of torch and the counters below
    are all that it carries along: batches are a function of the seed and the step, learning rates of the step.

    Each of ``processes`` holds a Trainer and takes its share of every batch.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        *,
        seed: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        parts = processes.size * config.accumulate
        if config.batch_size % parts:
            raise LabError(
                f"batch_size: expected a multiple of {parts}, the parts of a step, got {config.batch_size}"
            )
        self.model = model
        self.shared_model = processes.wrap(model)
        self.task = task
        self.config = config
        self.seed = seed
        self.processes = processes
        self.device = next(model.parameters()).device
        groups = param_groups(model, lr=config.lr, weight_decay=config.weight_decay)
        self.lr_scales = [group["lr"] / config.lr for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=True)
        self.step = 0
        self.seconds = 0.0
        self.metric = math.nan  # of the last evaluation
        self.timings: list[float] = []  # seconds of each step

    def run(self, on_step: Callable[[StepRecord], None] = lambda record: None) -> float:
        """Train to the end, telling ``on_step`` of every step; the final value of the validation metric."""
        while self.step < self.config.steps:
            on_step(self.train_step())
        return self.metric

    def train_step(self) -> StepRecord:
        """One update, and the evaluation if one is due. LabError when loss or gradient is not finite: the
        parameters are then still those before the step."""
        start = time.perf_counter()
        lr = self.config.lr_at(self.step)
        for group, scale in zip(self.optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = lr * scale
        inputs, targets = self.task.train_batch(self.step, self.config.batch_size, self.seed)
        self.optimizer.zero_grad()
        loss = self._backward(inputs, targets).item()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip).item()
        self._stop_unless_finite(loss=loss, gradient_norm=grad_norm)
        self.optimizer.step()
        self.timings.append(time.perf_counter() - start)
        self.seconds += self.timings[-1]
        self.step += 1
        evaluates = self.config.evaluates_after(self.step)
        return StepRecord(
            step=self.step,
            tokens=self.step * inputs.numel(),
            seconds=self.seconds,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            metric=self.evaluate() if evaluates else None,
        )

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradients of a batch's loss, part by part; that loss, the mean over its targets [B, T]."""
        count, rank, size = int((targets != NO_TARGET).sum()), self.processes.rank, self.processes.size
        parts = [part.chunk(size * self.config.accumulate)[rank::size] for part in (inputs, targets)]
        total = torch.zeros((), device=self.device)
        for number, (tokens, wanted) in enumerate(zip(*parts, strict=True), start=1):
            last = number == self.config.accumulate
            with nullcontext() if last else without_averaging(self.shared_model):
                with self._autocast():
                    logits, _ = self.shared_model(tokens.to(self.device))
                loss = _summed_loss(logits, wanted.to(self.device)) / count
                (loss * size).backward()  # the average over the processes is then the sum
            total += loss.detach()
        return self.processes.sum(total)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def evaluate(self) -> float:
        """The task's metric on its validation part: every process takes all of it, and none need be merged."""
        metric = self.task.metric().to(self.device)
        metric.sync_on_compute = False
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for inputs, targets in self.task.valid_batches(self.config.batch_size):
                logits, _ = self.model(inputs.to(self.device))
                metric.update(logits, targets.to(self.device))
        self.model.train()
        self.metric = float(metric.compute())
        self._stop_unless_finite(**{self.task.metric_name: self.metric})
        return self.metric

    @property
    def tokens_per_second(self) -> float:
        """Training speed of the median step: a pause of the machine does not count against a mixer."""
        timings = self.timings[WARM_UP_TIMINGS:] or self.timings
        return self.config.batch_size * self.task.seq_len / statistics.median(timings)

    def _stop_unless_finite(self, **values: float) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise LabError(
                    f"{name.replace('_', ' ')} became {value} after {self.step} of {self.config.steps} steps: "
                    f"try a learning rate below {self.config.lr:g}"
                )


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits [B, T, V] summed over the targets [B, T] that count."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )
