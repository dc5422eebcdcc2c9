"""Shows torchtitan, which knows accelerators only, a CPU as one: its real trainer then runs where there is no GPU.

    torchrun scripts/torchtitan_on_cpu.py --config hgrn2 ...

The arguments are those of seqzoo_plugins.torchtitan.
"""

import runpy
from types import SimpleNamespace
from typing import Any

import torch


def pretend() -> None:
    """Before torchtitan is imported."""

    def nothing(*_: Any) -> None:
        """A CPU has no device to set, no cache to empty and no queue to wait for."""

    cpu = SimpleNamespace(
        set_device=nothing, synchronize=nothing, empty_cache=nothing, reset_peak_memory_stats=nothing,
        current_device=lambda: 0, device_count=lambda: 64, get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1), memory_stats=lambda *_: {},
    )  # fmt: skip
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: cpu  # type: ignore[assignment, return-value]


if __name__ == "__main__":
    pretend()
    runpy.run_module("seqzoo_plugins.torchtitan", run_name="__main__", alter_sys=True)
