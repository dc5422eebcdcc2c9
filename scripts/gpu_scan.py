"""linear_scan's Triton kernels on a GPU: law 8 against float64, bitwise the same twice, and speed beside the floor.

    python scripts/gpu_scan.py [--jobs 8] [--json FILE]

Memory is filled with NaN before every call, so that what is not written shows. Times are of the kernels alone, replayed as a
CUDA graph, and of an eager call with autograd; the floor is a copy of as many bytes. Prints a row a case and one summary
line; fails if any check does. Checks run in several processes, for most of their time goes into compiling.
"""

import argparse
import datetime
import json
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from seqzoo_kernels import linear_scan, precision
from seqzoo_kernels.linear_scan import triton as triton_scan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATES = (0.0, -1e-6, -3e-4, -0.1, -1.0, -20.0, -1e3, -1e9, -torch.inf)
SPEED = ((8, 2048, 2048), (1, 16384, 2048), (1, 131072, 256))


def inputs(B: int, T: int, D: int, dtype: torch.dtype, *, gate: float | None, constant: bool) -> list[Tensor]:
    """log_decay, x and the weights of the result; gates of all kinds side by side, or all alike."""
    generator = torch.Generator("cuda").manual_seed(T + D)
    shape = (D,) if constant else (B, T, D)
    g = (
        -torch.rand(shape, generator=generator, device="cuda")
        if gate is None
        else torch.full(shape, gate).cuda()
    )
    if gate is None:
        kinds = torch.tensor(GATES, device="cuda")
        pick = torch.randint(3 * len(GATES), shape, generator=generator, device="cuda")
        g = torch.where(pick < len(GATES), kinds[pick % len(GATES)], g)
    x, w = (torch.randn(B, T, D, generator=generator, device="cuda").to(dtype) for _ in range(2))
    return [g if dtype == torch.float32 else g.to(dtype if not constant else torch.float32), x, w]


def results(
    g: Tensor, x: Tensor, w: Tensor, state: Tensor | None, backend: str, **options: Any
) -> dict[str, Tensor]:
    """Values, final state and every gradient."""
    leaves = [t.detach().requires_grad_() for t in (g, x, *(() if state is None else (state,)))]
    out, final = linear_scan(
        leaves[0], leaves[1], initial_state=None if state is None else leaves[2], backend=backend, **options
    )
    loss = (out.double() * w.double()).sum() + final.double().cos().sum()
    grads = torch.autograd.grad(loss, leaves)
    names = ("d_log_decay", "d_x", "d_initial_state")
    return {"out": out.detach(), "final": final.detach(), **dict(zip(names, grads, strict=False))}


def check(B: int, T: int, D: int, dtype: torch.dtype, **kind: Any) -> float:
    """Largest error over what law 8 allows."""
    ends = kind.pop("cu_seqlens", None)
    cu = None if ends is None else torch.tensor(ends, device="cuda")
    options = {"reverse": kind.pop("reverse", False), "cu_seqlens": cu}
    mode, constant = kind.pop("mode", "parallel"), kind.get("constant", False)
    g, x, w = inputs(B, T, D, dtype, **kind)
    rows = B if cu is None else len(cu) - 1
    state = torch.randn(rows, D, device="cuda")
    ours, again = (results(g, x, w, state, "triton", mode=mode, **options) for _ in range(2))
    for name, value in ours.items():
        assert torch.equal(value, again[name]), f"{name} differs from run to run"
    g64, x64, w64, state64 = (t.double() for t in (g, x, w, state))
    exact = results(g64, x64, w64, state64, "torch", **options)
    terms = None
    if constant:
        terms = results(g64.expand(x.shape), x64, w64, state64, "torch", **options)["d_log_decay"]
    reference = results(g, x, w, state, "reference", **options)
    worst = 0.0
    for name, wanted in exact.items():
        scale = None
        if terms is not None and name == "d_log_decay":
            scale = precision.sum_scale(wanted, terms)
        precision.check_close(ours[name], wanted, reference[name], dtype=dtype, name=name, scale=scale)
        error = (ours[name].double() - wanted).abs().max().item()
        allowed = precision.allowed_error(wanted, reference[name], dtype, scale=scale)
        worst = max(worst, error / allowed)
    return worst


def run_check(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The row of a check."""
    name, sizes, kind = case
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010
    torch.use_deterministic_algorithms(True)
    try:
        worst = check(*sizes, **dict(kind))
    except Exception as error:
        return {"check": name, "passed": False, "why": f"{type(error).__name__}: {error}"[:300]}
    return {"check": name, "passed": True, "share of the allowed error": round(worst, 3)}


def speed(B: int, T: int, D: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds, medians: the passes, and copies of as many bytes as they must read and write."""
    g, x, w = inputs(B, T, D, dtype, gate=-0.1, constant=False)
    call = (g, x, None, None, None, False, "parallel", 256)
    out, final = triton_scan.forward(*call)
    d_final = torch.zeros_like(final)
    g_leaf, x_leaf = g.clone().requires_grad_(), x.clone().requires_grad_()

    def replayed(function: Any) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return float(do_bench_cudagraph(function, return_mode="median"))

    def copies(count: int) -> float:
        a, b = torch.empty(2, count * x.numel() // 2, dtype=dtype, device="cuda").unbind(0)
        return float(do_bench(lambda: b.copy_(a), return_mode="median"))

    def eager() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_scan(g_leaf, x_leaf, backend="triton")[0], (g_leaf, x_leaf), w)

    times = {
        "forward": replayed(lambda: triton_scan.forward(*call)),
        "forward floor": copies(3),
        "backward": replayed(lambda: triton_scan.backward(w, d_final, out, final, *call)),
        "backward floor": copies(5),
        "forward and backward, eager": float(do_bench(eager, return_mode="median")),
    }
    return {name: round(value, 4) for name, value in times.items()}


def main() -> None:
    """Run all checks, then all timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes of the checks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cu = [0, 0, 13, 500, 1000]
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for dtype in DTYPES:
        kinds: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("gates of all kinds", (2, 1000, 100), {"gate": None, "constant": False}),
            ("constant gates of all kinds", (2, 777, 64), {"gate": None, "constant": True}),
            ("reverse", (3, 513, 33), {"gate": None, "constant": False, "reverse": True}),
            ("a pack", (1, 1003, 70), {"gate": None, "constant": False, "cu_seqlens": cu}),
            ("recurrent", (2, 300, 96), {"gate": None, "constant": False, "mode": "recurrent"}),
            ("one token", (3, 1, 257), {"gate": None, "constant": False}),
            ("many columns", (8, 600, 2048), {"gate": None, "constant": False}),
            ("near one, long", (1, 16384, 64), {"gate": -1e-6, "constant": False}),
        ]
        cases += [(f"{name} {list(sizes)} {dtype}", (*sizes, dtype), kind) for name, sizes, kind in kinds]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for row in pool.map(run_check, cases):
            rows.append(row)
            print(row, flush=True)
    times = []
    for sizes in SPEED:
        for dtype in DTYPES[:2]:
            times.append({"shape": list(sizes), "dtype": str(dtype), **speed(*sizes, dtype)})
            print(times[-1], flush=True)
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    if args.json:
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name(),
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "python": platform.python_version(),
            },
            "rows": rows,
            "milliseconds": times,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
