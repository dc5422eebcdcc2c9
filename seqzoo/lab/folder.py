"""The folder that a run leaves behind: config.json and metrics.jsonl."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from types import TracebackType

import torch

from seqzoo.lab.errors import LabError

CONFIG = "config.json"
METRICS = "metrics.jsonl"


class ResultsFolder:
    """Opened, and so proved writable, before anything is trained. A context manager."""

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise LabError(f"out: {self.path} is a file, not a folder") from None
        metrics = self.path / METRICS
        if metrics.exists() and metrics.stat().st_size and not overwrite:
            raise LabError(
                f"out: {self.path} already holds results: choose another folder, or overwrite them"
            )
        self._metrics = metrics.open("w", encoding="utf-8")

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()

    def write_config(self, config: dict[str, object]) -> None:
        """Keep the configuration, beside the versions and the machine; the file is there whole or not at all."""
        text = json.dumps({**config, "environment": environment()}, indent=2)
        partial = self.path / (CONFIG + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.path / CONFIG)

    def log(self, event: str, values: dict[str, object]) -> None:
        """Append one line of metrics, at once on disk for whoever follows the file."""
        self._metrics.write(json.dumps({"event": event, **values}) + "\n")
        self._metrics.flush()


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
