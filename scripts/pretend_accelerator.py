"""Shows torchtitan, which knows accelerators only, a CPU as one, so that its real trainer runs where there is no GPU.

Import it before torchtitan.
"""

from types import SimpleNamespace
from typing import Any

import torch


def nothing(*_: Any) -> None:
    """A CPU has no device to set, no cache to empty and no queue to wait for."""


CPU = SimpleNamespace(
    set_device=nothing,
    synchronize=nothing,
    empty_cache=nothing,
    reset_peak_memory_stats=nothing,
    current_device=lambda: 0,
    device_count=lambda: 64,
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
    memory_stats=lambda *_: {},
)
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: CPU  # type: ignore[assignment, return-value]
