"""What a command runs on: threads, device, versions."""

from __future__ import annotations

import datetime
import platform

import torch

import seqzoo
from seqzoo.lab.errors import LabError


def set_threads(count: int) -> None:
    """Let torch use ``count`` CPU threads, or with 0 as many as it likes.

    The default is 1: at the default width a second thread gains little, and its waiting costs a lot once the
    cores are shared with anything else.
    """
    if count < 0:
        raise LabError(f"threads: expected 0 or more, got {count}")
    if count:
        torch.set_num_threads(count)


def find_device(name: str) -> str:
    """The device of that name, tried out; for "auto", a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device: {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def versions() -> dict[str, str]:
    """What a figure depends on besides the code."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqzoo": seqzoo.__version__,
        "machine": platform.machine(),
    }
