"""One training run: the optimiser, the schedule, the steps, the evaluation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqzoo.lab.errors import LabError

if TYPE_CHECKING:
    from torchmetrics import Metric

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
    """The budget and the optimiser of a run."""

    steps: int = 400
    batch_size: int = 8
    lr: float = 4e-3
    warmup: float = 0.1  # share of the steps
    final_lr: float = 0.1  # share of lr that the cosine ends at
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 8

    def __post_init__(self) -> None:
        """Refuse what could not be run."""
        for name in ("steps", "batch_size", "evaluations"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise LabError(f"lr: expected a number above 0, got {self.lr}")

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


class Trainer:
    """A run that goes on from ``step``. Model, optimiser and the counters below are all that it carries along:
    batches are a function of the seed and the step, learning rates of the step."""

    def __init__(self, model: nn.Module, task: Task, config: TrainConfig, *, seed: int = 0) -> None:
        self.model = model
        self.task = task
        self.config = config
        self.seed = seed
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay), lr=config.lr, betas=config.betas, fused=True
        )
        self.step = 0
        self.seconds = 0.0
        self.timings: list[float] = []  # seconds of each step

    def run(self, on_step: Callable[[StepRecord], None] = lambda record: None) -> float:
        """Train to the end, telling ``on_step`` of every step; the final value of the validation metric."""
        metric = math.nan
        while self.step < self.config.steps:
            record = self.train_step()
            if record.metric is not None:
                metric = record.metric
            on_step(record)
        return metric

    def train_step(self) -> StepRecord:
        """One update, and the evaluation if one is due. LabError when loss or gradient is not finite: the
        parameters are then still those before the step."""
        start = time.perf_counter()
        lr = self.config.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self.task.train_batch(self.step, self.config.batch_size, self.seed)
        self.optimizer.zero_grad()
        logits, _ = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(self.device).flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self._stop_unless_finite(loss=loss.item(), gradient_norm=grad_norm.item())
        self.optimizer.step()
        self.timings.append(time.perf_counter() - start)
        self.seconds += self.timings[-1]
        self.step += 1
        return StepRecord(
            step=self.step,
            tokens=self.step * inputs.numel(),
            seconds=self.seconds,
            loss=loss.item(),
            lr=lr,
            grad_norm=grad_norm.item(),
            metric=self.evaluate() if self.config.evaluates_after(self.step) else None,
        )

    def evaluate(self) -> float:
        """The task's metric on its validation part."""
        metric = self.task.metric().to(self.device)
        self.model.eval()
        with torch.no_grad():
            for inputs, targets in self.task.valid_batches(self.config.batch_size):
                logits, _ = self.model(inputs.to(self.device))
                metric.update(logits, targets.to(self.device))
        self.model.train()
        value = float(metric.compute())
        self._stop_unless_finite(**{self.task.metric_name: value})
        return value

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


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameters for AdamW: matrices decay; biases, gains, decays and other vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
