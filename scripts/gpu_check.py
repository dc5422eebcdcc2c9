"""What only a GPU can show of the contract: right numbers there, no wait for the device, decoding inside a CUDA graph.

    python scripts/gpu_check.py [--jobs 4] [--json FILE]

Prints a row a check and one summary line; fails if any check does.
"""

import argparse
import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seqzoo
from seqzoo import states
from seqzoo_kernels import use_backend
from seqzoo_kernels.bench import output, timing
from seqzoo_kernels.precision import relative_error

DIM, T = 64, 200


def make(name: str, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """A mixer with random weights and its input, on the GPU."""
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, DIM).to("cuda", dtype)
    return mixer, torch.randn(4, T, DIM, device="cuda", dtype=dtype)


def numbers(name: str, dtype: torch.dtype, bound: float) -> float:
    """Every mode's output and input gradient, against float64 on the reference backend."""
    mixer, x = make(name, dtype)
    exact = copy.deepcopy(mixer).double()
    x64 = x.double().requires_grad_()
    with use_backend("reference"):
        y64, _ = exact(x64)
    weights = torch.randn_like(y64)
    (y64 * weights).sum().backward()
    worst = 0.0
    for mode in ("auto", *mixer.modes):
        x_ = x.clone().requires_grad_()
        y, _ = mixer(x_, mode=mode)
        (y.double() * weights).sum().backward()
        worst = max(worst, relative_error(y, y64), relative_error(x_.grad, x64.grad))
    assert worst < bound, f"error {worst}"
    return worst


def no_wait(name: str) -> float:
    """Plain, padded and packed calls and a step, forward and backward, with synchronisation an error."""
    mixer, x = make(name, torch.float32)
    mask = torch.rand(4, T, device="cuda") > 0.3
    cu_seqlens = torch.tensor([0, 0, 13, 100, 180], device="cuda")
    calls: list[Callable[[], tuple[Tensor, Any]]] = [
        lambda: mixer(x),
        lambda: mixer(x, mask=mask),
        lambda: mixer(x[:1], cu_seqlens=cu_seqlens, max_seqlen=90),
        lambda: mixer.step(x[:, 0], mixer.init_state(4)),
        lambda: mixer.step(x[:, 0], mixer.init_state(4, capacity=8), donate=True),
    ]
    for warm in (True, False):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            for call in calls[:3]:
                call()[0].sum().backward()
            with torch.no_grad():
                for call in calls[3:]:
                    call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return 0.0


@torch.no_grad()
def graph(name: str) -> float:
    """Decoding by replaying one captured step equals the full pass."""
    mixer, x = make(name, torch.float32)
    full, _ = mixer(x)
    state = mixer.init_state(4, capacity=T)
    fresh = states.map_state(torch.clone, state)
    x_t = x[:, 0].clone()
    replayable, (y_t, _) = timing.captured(lambda: mixer.step(x_t, state, donate=True))
    states.map_state(Tensor.copy_, state, fresh)
    outputs = []
    for t in range(T):
        x_t.copy_(x[:, t])
        replayable.replay()
        outputs.append(y_t.clone())
    error = relative_error(torch.stack(outputs, 1), full)
    assert error < 1e-4, f"error {error}"
    return error


CHECKS: dict[str, Callable[[str], float]] = {
    "float32": lambda name: numbers(name, torch.float32, 1e-4),
    "bfloat16": lambda name: numbers(name, torch.bfloat16, 1e-1),
    "no wait for the device": no_wait,
    "CUDA graph of a step": graph,
}


def run_check(name: str, check: str) -> dict[str, Any]:
    return output.judged({"mixer": name, "check": check}, CHECKS[check], name, told="error")


def main() -> None:
    """Run every check on every registered mixer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    log = output.Log(args.json, torch.device("cuda"))
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for row in pool.map(run_check, *zip(*itertools.product(seqzoo.list_mixers(), CHECKS), strict=True)):
            log.add(row)
    log.finish()


if __name__ == "__main__":
    main()
