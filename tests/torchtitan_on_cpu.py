"""torchtitan's own trainer on a CPU, run by test_torchtitan_plugin.py under torchrun: it knows accelerators only, so it is
shown a CPU as one. The arguments are those of seqzoo_plugins.torchtitan."""

import runpy
import types

import torch


def device_module() -> types.SimpleNamespace:
    """What torchtitan asks of an accelerator, answered for a CPU."""
    nothing = lambda *_: None  # noqa: E731
    return types.SimpleNamespace(
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
        current_device=lambda: 0,
        device_count=lambda: 64,
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1),
        memory_stats=lambda *_: {},
    )


def main() -> None:
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: device_module()
    runpy.run_module("seqzoo_plugins.torchtitan", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
