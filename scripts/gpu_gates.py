"""Elementwise ops of the mixers on a GPU: law 8 against float64, bitwise the same twice, and speed beside a copy of the bytes.

    python scripts/gpu_gates.py [--only checks|speed] [--jobs 4] [--device cuda] [--json FILE]

Memory is filled with NaN before every call, so that what is not written shows. Beside ours stand the plain form that autograd
differentiates, `torch.compile` of it, and a copy of as many bytes as must be moved. Prints a row a case and one summary line;
fails if any check does.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqzoo.testing import poisoned_memory
from seqzoo_kernels import precision
from seqzoo_kernels.bench import output, timing
from seqzoo_kernels.forget_gate import forget_gate

BOUNDS = ("none", "number", "tensor", "open")
WHOLE = (2, 130, 2048)  # B, T, D of every kind of call
OTHERS = (
    (3, 7, 33),
    (1, 1, 2048),
    (2, 0, 64),
    (1, 5000, 300),
)  # of some, since most of the time goes into compiling
SPEED = (8, 2048, 2048)
EXTREME = (100.0, -100.0, 20.0, -20.0, 1e-6, 0.0, torch.inf, -torch.inf)
COMPILED = "forget_gate, bound tensor, 1 numbers a channel"  # timed under torch.compile too
REPEATS = 30
Call = Callable[..., tuple[Tensor, ...]]


def gate_inputs(shape: Sequence[int], dtype: torch.dtype, numbers: int, device: str) -> list[Tensor]:
    """logits with extremes among them and x, chunks of a wider tensor, and a rate, of which the bound is made."""
    B, T, D = shape
    torch.manual_seed(T + D)
    z = (4 * torch.randn(B, T, 2 * D, device=device)).to(dtype)[..., D:]
    kinds = torch.tensor(EXTREME, device=device).to(dtype)
    pick = torch.randint(8 * len(EXTREME), (B, T, D), device=device)
    z.copy_(torch.where(pick < len(EXTREME), kinds[pick % len(EXTREME)], z))
    x = torch.randn(B, T, 2 * numbers * D, device=device).to(dtype)[..., numbers * D :]
    return [z, x.unflatten(-1, (D, 2)) if numbers == 2 else x, torch.rand(D, device=device) + 0.05]


def gate(bound: str, numbers: int, backend: str) -> Call:
    """forget_gate of `gate_inputs`."""

    def call(z: Tensor, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        gamma = None if bound == "none" else 0.3 if bound == "number" else torch.exp(-rate)
        open_part = -torch.expm1(-rate) if bound == "open" else None
        value = x if numbers else None
        return forget_gate(z, gamma, value, open_part=open_part, activation="silu", backend=backend)

    return call


def results(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What it returns, and the gradients of a loss in which infinities have no part; None where there is none."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outs = call(*leaves)
    loss = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for out in outs:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        loss = loss + (torch.where(out.isfinite(), out, 0).double() * weights.to(out.device)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*(out.detach() for out in outs), *(g for g in grads if g is not None)]


def check(ours: Call, plain: Call, tensors: Sequence[Tensor]) -> float:
    """Largest error over what law 8 allows: of each result in its own dtype, of ours from the inputs as they are."""
    found, again = (results(ours, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "differs from run to run"
    near = results(plain, [t.float() for t in tensors])
    exact = results(plain, [t.double() for t in tensors])
    worst = 0.0
    for k, (value, reference, right) in enumerate(zip(found, near, exact, strict=True)):
        precision.check_close(value, right, reference, dtype=value.dtype, name=f"result {k}")
        if value.numel():
            allowed = precision.allowed_error(right, reference, value.dtype)
            finite = right.isfinite()
            error = (value.double() - right)[finite].abs()
            worst = max(worst, error.max().item() / allowed if error.numel() and allowed else 0.0)
    return worst


def gate_check(bound: str, numbers: int, shape: Sequence[int], dtype: torch.dtype, device: str) -> float:
    tensors = gate_inputs(shape, dtype, numbers, device)
    return check(gate(bound, numbers, "triton"), gate(bound, numbers, "reference"), tensors)


def checks() -> list[tuple[str, Callable[..., float], tuple[Any, ...]]]:
    """Name, function and arguments of each; another op adds its own."""
    cases: list[tuple[str, int, tuple[int, ...], torch.dtype]] = [
        *itertools.product(BOUNDS, (0, 1, 2), (WHOLE,), (torch.float32, torch.bfloat16)),
        *itertools.product(("tensor",), (0, 1, 2), (WHOLE,), (torch.float16,)),
        *itertools.product(("none", "tensor"), (1, 2), OTHERS, (torch.bfloat16,)),
    ]
    return [
        (f"forget_gate, bound {bound}, {numbers} numbers a channel, {list(shape)} {str(dtype)[6:]}", gate_check,
         (bound, numbers, shape, dtype))
        for bound, numbers, shape, dtype in cases
    ]  # fmt: skip


def run_check(job: tuple[str, Callable[..., float], Sequence[Any]], device: str) -> dict[str, Any]:
    name, function, given = job
    with poisoned_memory():
        return output.judged({"check": name}, function, *given, device)


def speeds() -> dict[str, tuple[Call, Call, Callable[[str], list[Tensor]]]]:
    """Ours, the plain form, and the inputs of each case that is timed; another op adds its own."""

    def inputs(numbers: int) -> Callable[[str], list[Tensor]]:
        return lambda device: gate_inputs(SPEED, torch.bfloat16, numbers, device)

    return {
        f"forget_gate, bound {bound}, {numbers} numbers a channel": (
            gate(bound, numbers, "triton"),
            gate(bound, numbers, "reference"),
            inputs(numbers),
        )
        for bound, numbers in (("none", 1), ("tensor", 1), ("tensor", 2), ("tensor", 0))
    }


def speed(name: str, device: str) -> dict[str, Any]:
    """Milliseconds, medians, of forward and of backward alone, and microseconds of a step as a CUDA graph."""
    ours, plain, inputs = speeds()[name]
    leaves = [t.detach().requires_grad_() for t in inputs(device)]
    torch.compiler.reset()
    ways = {"ours": ours, "plain": plain}
    if name == COMPILED:
        ways["plain, compiled"] = torch.compile(plain)
    where, row = torch.device(device), {}
    for way, call in ways.items():
        outs = call(*leaves)
        used = [t for t, g in zip(leaves, torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs],
                retain_graph=True, allow_unused=True), strict=True) if g is not None]  # fmt: skip
        weights = [torch.randn_like(out) for out in outs]

        def backward(outs: Any = outs, used: Any = used, weights: Any = weights) -> object:
            return torch.autograd.grad(outs, used, weights, retain_graph=True)

        with torch.no_grad():
            forward = timing.median(lambda call=call: call(*leaves), where, REPEATS)  # type: ignore[misc]
        row[way] = {"forward": forward, "backward": timing.median(backward, where, REPEATS)}
        if way != "plain, compiled":
            step = [t[:, :1].detach() if t.dim() > 1 else t.detach() for t in leaves]
            with torch.no_grad():
                graph, _ = timing.captured(lambda call=call, step=step: call(*step))  # type: ignore[misc]
            row[way]["step in a graph, us"] = round(1e3 * timing.median(graph.replay, where, REPEATS), 2)
    read = sum(t.numel() * t.element_size() for t in used)
    wrote = sum(out.numel() * out.element_size() for out in outs)
    row["copy of as many bytes"] = {
        "forward": timing.median(timing.copy(read + wrote, where), where, REPEATS),
        "backward": timing.median(timing.copy(2 * read + wrote, where), where, REPEATS),
    }
    return {"case": f"{name}, {list(SPEED)} bfloat16", **row}


def main() -> None:
    """Run all checks, then all timings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("checks", "speed"), help="one part of it")
    parser.add_argument("--jobs", type=int, default=4, help="processes of the checks")
    parser.add_argument("--device", default="cuda", help="cpu: the checks alone, in Triton's interpreter")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: list[dict[str, Any]] = []
    log = output.Log(args.json, torch.device(args.device), milliseconds=times)
    if args.only != "speed":
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for row in pool.map(functools.partial(run_check, device=args.device), checks()):
                log.add(row)
    if args.only != "checks" and args.device.startswith("cuda"):
        for name in speeds():
            log.add(speed(name, args.device), times)
    log.finish()


if __name__ == "__main__":
    main()
