"""Live progress of a comparison or a run. Importing this module imports rich."""

from __future__ import annotations

import datetime
import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from seqzoo.lab.compare import Comparison, Result, Run
from seqzoo.lab.train import StepRecord, TrainConfig

WIDTH_OF_A_PIPE = 100  # columns, where no terminal says its own
SECONDS_BETWEEN_LINES = 10.0


def console(*, stderr: bool = False) -> Console:
    """A console that does not squeeze what goes to a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_PIPE)


class Progress:
    """Shows steps while they run, on stderr: a bar on a terminal, else a line now and then. A context manager."""

    def __init__(self, total: int, metric_name: str) -> None:
        self.metric_name = metric_name.replace("_", " ")
        self.metric = math.nan  # the newest of the run
        self.last_line = time.monotonic()
        self.console = console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar_id = self.bar.add_task("starting", total=total, status="")

    def __enter__(self) -> None:
        self.bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, title: str, done: int, record: StepRecord, steps: int, left: str = "") -> None:
        """Show a step of a run of ``steps``, when ``done`` of all runs' steps are done."""
        if record.metric is not None or record.step == 1:
            self.metric = math.nan if record.metric is None else record.metric
        status = f"loss {record.loss / math.log(2):.2f} bits"
        if not math.isnan(self.metric):
            status += f" · {self.metric_name} {self.metric:.3f}"
        self.bar.update(self.bar_id, description=title, completed=done, status=status)
        if not self.console.is_terminal and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.line(f"{title}: step {record.step}/{steps} · {status}{left}")

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)
        self.last_line = time.monotonic()


class ComparisonProgress(Progress):
    """Progress of a comparison."""

    def __init__(self, comparison: Comparison, metric_name: str) -> None:
        self.runs = comparison.runs
        self.steps = comparison.training.steps
        super().__init__(len(self.runs) * self.steps, metric_name)

    def on_step(self, run: Run, record: StepRecord) -> None:
        """Show a step."""
        number = self.runs.index(run)
        title = f"{run.mixer} {number + 1}/{len(self.runs)}"
        self.show(title, number * self.steps + record.step, record, self.steps)

    def on_result(self, result: Result) -> None:
        """Show a finished run: a line that stays."""
        seed = f" (seed {result.seed})" if len({run.seed for run in self.runs}) > 1 else ""
        self.line(f"{result.mixer}{seed}: {self.metric_name} {result.metric:.3f} in {result.seconds:.0f} s")


class RunProgress(Progress):
    """Progress of one run, which may start at a later step than the first."""

    def __init__(self, title: str, config: TrainConfig, metric_name: str) -> None:
        super().__init__(config.steps, metric_name)
        self.title = title
        self.steps = config.steps
        self.start: tuple[int, float] | None = None  # the first step here, and when it was done

    def on_step(self, record: StepRecord) -> None:
        """Show a step, and how long the rest will take."""
        now = time.monotonic()
        if self.start is None:
            self.start = record.step, now
            self.bar.reset(self.bar_id, completed=record.step)
        first, then = self.start
        left = ""
        if record.step > first:
            seconds = (now - then) / (record.step - first) * (self.steps - record.step)
            left = f" · {datetime.timedelta(seconds=round(seconds))} left"
        self.show(self.title, record.step, record, self.steps, left)
