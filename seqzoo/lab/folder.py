"""The folder that a run leaves behind: config.json and metrics.jsonl."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import IO

import torch

from seqzoo.lab.errors import LabError

CONFIG = "config.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"


class ResultsFolder:
    """Opened, and so proved writable, before anything is trained. A context manager.

    With ``steps_done`` it goes on with the metrics that are there, but for what followed that step.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, steps_done: int | None = None) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise LabError(f"out: {self.path} is a file, not a folder") from None
        metrics = self.path / METRICS
        if steps_done is not None:
            self._metrics: IO[bytes] = metrics.open("a+b")
            self._metrics.truncate(_end_of_step(self._metrics, steps_done))
            return
        if metrics.exists() and metrics.stat().st_size and not overwrite:
            raise LabError(
                f"out: {self.path} already holds results: choose another folder, or overwrite them"
            )
        self._metrics = metrics.open("wb")
        (self.path / REPORT).unlink(missing_ok=True)  # of the results that are gone

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._metrics.close()
        except OSError:  # of a line that could not be written, as has been said
            if error is None:
                raise

    def write_config(self, config: dict[str, object]) -> None:
        """Keep the configuration, beside the versions and the machine; the file is there whole or not at all."""
        text = json.dumps({**config, "environment": environment()}, indent=2)
        try:
            write_whole(self.path / CONFIG, text.encode() + b"\n")
        except OSError as error:
            raise LabError(f"out: {self.path / CONFIG} could not be written: {error.strerror}") from error

    def log(self, event: str, values: dict[str, object]) -> None:
        """Append one line of metrics, at once on disk for whoever follows the file."""
        try:
            self._metrics.write(json.dumps({"event": event, **values}).encode() + b"\n")
            self._metrics.flush()
        except OSError as error:
            raise LabError(f"out: {self.path / METRICS} could not be written: {error.strerror}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that at any moment, even of a power cut, ``path`` is whole or what it was before."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _end_of_step(metrics: IO[bytes], steps: int) -> int:
    """Where the lines of the first ``steps`` steps end; the last line of a killed run may be half there."""
    end = 0
    metrics.seek(0)
    for line in metrics:
        try:
            values = json.loads(line)
            kept = values["event"] == "step" and values["step"] <= steps and line.endswith(b"\n")
        except (ValueError, KeyError, TypeError):
            break
        if not kept:
            break
        end += len(line)
    return end


def environment() -> dict[str, object]:
    """Versions and the machine: what a speed cannot be read without."""
    import seqzoo

    return {
        "seqzoo": seqzoo.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
