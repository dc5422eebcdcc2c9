"""Live progress of a comparison. Importing this module imports rich."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from seqzoo.lab.compare import Comparison, Result, Run
from seqzoo.lab.train import StepRecord

WIDTH_OF_A_PIPE = 100  # columns, where no terminal says its own
SECONDS_BETWEEN_LINES = 10.0


def console(*, stderr: bool = False) -> Console:
    """A console that does not squeeze what goes to a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_PIPE)


class ComparisonProgress:
    """Shows a comparison while it runs, on stderr: a bar on a terminal, else a line now and then. A context manager."""

    def __init__(self, comparison: Comparison, metric_name: str) -> None:
        self.runs = comparison.runs
        self.steps = comparison.training.steps
        self.metric_name = metric_name.replace("_", " ")
        self.metric = math.nan  # the newest of the run
        self.last_line = time.monotonic()
        self.console = console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar_id = self.bar.add_task("starting", total=len(self.runs) * self.steps, status="")

    def __enter__(self) -> ComparisonProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def on_step(self, run: Run, record: StepRecord) -> None:
        """Show a step."""
        if record.metric is not None or record.step == 1:
            self.metric = math.nan if record.metric is None else record.metric
        number = self.runs.index(run)
        title = f"{run.mixer} {number + 1}/{len(self.runs)}"
        status = f"loss {record.loss / math.log(2):.2f} bits"
        if not math.isnan(self.metric):
            status += f" · {self.metric_name} {self.metric:.3f}"
        done = number * self.steps + record.step
        self.bar.update(self.bar_id, description=title, completed=done, status=status)
        if not self.console.is_terminal and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self._line(f"{title}: step {record.step}/{self.steps} · {status}")

    def on_result(self, result: Result) -> None:
        """Show a finished run: a line that stays."""
        seed = f" (seed {result.seed})" if len({run.seed for run in self.runs}) > 1 else ""
        self._line(f"{result.mixer}{seed}: {self.metric_name} {result.metric:.3f} in {result.seconds:.0f} s")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False)
        self.last_line = time.monotonic()
