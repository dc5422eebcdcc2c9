"""linear_scan's Triton kernels on a GPU: law 8 against float64, bitwise the same twice, and speed beside the floor.

    python scripts/gpu_scan.py [--jobs 8] [--only checks|large|speed|tiles] [--json FILE]

Memory is filled with NaN before every call, so that what is not written shows. Times are of the kernels alone, replayed as a
CUDA graph, and of an eager call with autograd; the floor is a copy of as many bytes. Prints a row a case and one summary
line; fails if any check does. Checks run in several processes, for most of their time goes into compiling.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from seqzoo.testing import poisoned_memory
from seqzoo_kernels import linear_scan, precision
from seqzoo_kernels.bench import output, timing
from seqzoo_kernels.linear_scan import triton as triton_scan
from seqzoo_kernels.linear_scan.triton import Tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATES = (0.0, -1e-6, -3e-4, -0.1, -1.0, -20.0, -1e3, -1e9, -torch.inf)
SPEED = ((8, 2048, 2048), (1, 16384, 2048), (1, 131072, 256))
TURNING = ("constant phase, complex", "varying phase, complex", "constant decay and phase, complex")
CANDIDATES: dict[Any, tuple[Tile, ...]] = {  # for --only tiles
    torch.bfloat16: (
        Tile(4, 16, 64, 8, 4),
        Tile(2, 32, 64, 8, 2),
        Tile(4, 16, 16, 8, 1),
        Tile(4, 8, 32, 8, 1),
        Tile(2, 16, 32, 8, 1),
        Tile(2, 32, 32, 8, 1),
        Tile(2, 16, 64, 8, 1),
        Tile(4, 16, 64, 16, 4),
        Tile(4, 16, 32, 8, 1),
    ),
    torch.float32: (
        Tile(2, 16, 64, 8, 2),
        Tile(2, 8, 64, 8, 2),
        Tile(4, 8, 16, 8, 1),
        Tile(4, 16, 16, 8, 1),
        Tile(2, 16, 32, 8, 1),
        Tile(2, 8, 32, 8, 1),
    ),
    TURNING[0]: (
        Tile(8, 8, 8, 8, 1),
        Tile(8, 8, 8, 8, 1, 128),
        Tile(8, 4, 8, 8, 1),
        Tile(4, 8, 16, 8, 1, 128),
        Tile(4, 8, 16, 8, 1),
        Tile(4, 8, 64, 8, 4, 128),
        Tile(8, 8, 8, 8, 1, 112),
        Tile(4, 4, 16, 8, 1),
    ),
    TURNING[1]: (Tile(8, 8, 8, 8, 1, 128), Tile(8, 4, 8, 8, 1), Tile(8, 4, 8, 8, 1, 96)),
    TURNING[2]: (Tile(8, 8, 8, 8, 1), Tile(8, 8, 8, 8, 1, 128), Tile(4, 8, 16, 8, 1, 128)),
}


def inputs(
    B: int,
    T: int,
    D: int,
    dtype: torch.dtype,
    *,
    gate: float | None,
    constant: bool,
    phase: str | None = None,
) -> dict[str, Tensor]:
    """log_decay, x, phase and the weights of the result; gates of all kinds side by side, or all alike."""
    generator = torch.Generator("cuda").manual_seed(T + D)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    shape = (D,) if constant else (B, T, D)
    g = -drawn(*shape).sigmoid() if gate is None else torch.full(shape, gate, device="cuda")
    if gate is None:
        kinds = torch.tensor(GATES, device="cuda")
        pick = torch.randint(3 * len(GATES), shape, generator=generator, device="cuda")
        g = torch.where(pick < len(GATES), kinds[pick % len(GATES)], g)
    real = {"log_decay": g if constant else g.to(dtype), "x": drawn(B, T, D).to(dtype)}
    if phase is None:
        return {**real, "weights": drawn(B, T, D).to(dtype)}
    if "complex" in phase:
        real["x"] = torch.complex(drawn(B, T, D), drawn(B, T, D))
    weights = torch.complex(drawn(B, T, D), drawn(B, T, D))
    return {**real, "phase": 2 * (drawn(B, T, D) if "varying" in phase else drawn(D)), "weights": weights}


def results(tensors: dict[str, Tensor], backend: str, **options: Any) -> dict[str, Tensor]:
    """Values, final state and every gradient of a loss that weights the output."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if n != "weights"}
    out, final = linear_scan(**leaves, backend=backend, **options)
    weights = tensors["weights"]
    if out.is_complex():
        parts = torch.view_as_real(final).to(torch.float64)
        loss = (torch.view_as_real(out).double() * torch.view_as_real(weights).double()).sum()
    else:
        parts, loss = final.double(), (out.double() * weights.double()).sum()
    grads = torch.autograd.grad(loss + parts.cos().sum(), list(leaves.values()))
    return {
        "out": out.detach(),
        "final": final.detach(),
        **dict(zip([f"d_{n}" for n in leaves], grads, strict=True)),
    }


def check(B: int, T: int, D: int, dtype: torch.dtype, **kind: Any) -> float:
    """Largest error over what law 8 allows."""
    ends = kind.pop("cu_seqlens", None)
    cu = None if ends is None else torch.tensor(ends, device="cuda")
    options = {"reverse": kind.pop("reverse", False), "cu_seqlens": cu}
    mode = kind.pop("mode", "parallel")
    tensors = inputs(B, T, D, dtype, **kind)
    turning = "phase" in tensors
    rows = B if cu is None else len(cu) - 1
    tensors["initial_state"] = torch.randn(rows, D, dtype=torch.complex64 if turning else None, device="cuda")
    ours, again = (results(tensors, "triton", mode=mode, **options) for _ in range(2))
    for name, value in ours.items():
        assert torch.equal(value, again[name]), f"{name} differs from run to run"
    doubled = {n: precision.to_float64(t) for n, t in tensors.items()}
    exact = results(doubled, "torch", **options)
    constants = [n for n in ("log_decay", "phase") if n in tensors and tensors[n].dim() == 1]
    spread = {n: t.expand(B, T, D) if n in constants else t for n, t in doubled.items()}
    terms = results(spread, "torch", **options) if constants else {}
    size = [terms[f"d_{n}"].abs() for n in ("log_decay", "phase") if f"d_{n}" in terms]
    reference = results(tensors, "reference", **options)
    worst = 0.0
    for name, wanted in exact.items():
        half = ours[name].dtype in (torch.bfloat16, torch.float16)  # a complex state is float32 whatever x is
        judged = torch.float32 if turning and not half else dtype
        constant = name.removeprefix("d_") in constants
        scale = precision.sum_scale(wanted, sum(size)) if constant else None  # type: ignore[arg-type]
        precision.check_close(ours[name], wanted, reference[name], dtype=judged, name=name, scale=scale)
        error = (ours[name] - wanted).abs().max().item()
        worst = max(worst, error / precision.allowed_error(wanted, reference[name], judged, scale=scale))
    return worst


def many_elements(turning: bool) -> float:
    """More than 2^31 of them: the first and the last row, values and gradients, are what they are alone, bit for bit."""
    B, T, D = 5, 2**18, 2048
    g, x = (torch.empty(B, T, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tensors = {"log_decay": g.uniform_(-1, 0), "x": x.normal_()}
    if turning:
        tensors["phase"] = torch.randn(D, device="cuda")

    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        own = {
            n: (t[rows] if t.dim() == 3 else t).detach().clone().requires_grad_() for n, t in tensors.items()
        }
        out, _ = linear_scan(**own, backend="triton")
        wanted = (own["log_decay"], own["x"])
        return out.detach(), *torch.autograd.grad(out, wanted, out.detach())

    whole = run(slice(None))
    for row in (0, B - 1):
        for name, got, alone in zip(
            ("out", "d log_decay", "d x"), whole, run(slice(row, row + 1)), strict=True
        ):
            assert torch.equal(got[row], alone[0]), f"{name} of row {row} differs from what it is alone"
    return 0.0


def many_sequences(packed: bool, turning: bool) -> float:
    """More than 65,535 of them, in a pack or in a batch, beside the torch backend in float64 and float32."""
    N, T, D = 70_000, 3, 24
    shape, cu = ((1, N * T, D), torch.arange(N + 1, device="cuda") * T) if packed else ((N, T, D), None)
    tensors = inputs(
        *shape, torch.float32, gate=None, constant=False, phase="constant phase" if turning else None
    )
    doubled = {n: precision.to_float64(t) for n, t in tensors.items()}
    ours = results(tensors, "triton", cu_seqlens=cu)
    exact, plain = results(doubled, "torch", cu_seqlens=cu), results(tensors, "torch", cu_seqlens=cu)
    for name, wanted in exact.items():
        if name != "d_phase":  # a sum over everything: judged by `check`
            precision.check_close(ours[name], wanted, plain[name], dtype=torch.float32, name=name)
    return 0.0


def no_compilation(turning: bool) -> float:
    """None over 50 lengths and 50 packs after the first ones."""
    count, D = [0], 100
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: count.__setitem__(0, count[0] + 1)
    phase = torch.randn(D, device="cuda") if turning else None
    draw = random.Random(0)

    def run(T: int, pack: bool) -> None:
        g, x = (torch.rand(1, T, D, device="cuda").neg_().requires_grad_() for _ in range(2))
        cu = None
        if pack:
            cu = torch.tensor(sorted(draw.randint(0, T) for _ in range(draw.randint(2, 9))), device="cuda")
        out, _ = linear_scan(g, x, phase=phase, cu_seqlens=cu, backend="triton")
        torch.autograd.grad(out, (g, x), out.detach())

    for T in (2, 1500, 10_000, 40_000):  # one for each tile
        run(T, False)
        run(T, True)
    warm = count[0]
    assert warm, "the hook was not called"
    for T in (draw.randint(2, 40_000) for _ in range(50)):
        run(T, False)
        run(T, True)
    assert count[0] == warm, f"{count[0] - warm} compilations after the {warm} first ones"
    return 0.0


LARGE = {
    "many elements": (many_elements, (False,)),
    "many elements, complex": (many_elements, (True,)),
}
OTHERS = {
    "many sequences": (many_sequences, (False, False)),
    "many sequences in a pack": (many_sequences, (True, False)),
    "many sequences in a pack, complex": (many_sequences, (True, True)),
    "no compilation for another T or pack": (no_compilation, (False,)),
    "no compilation for another T or pack, complex": (no_compilation, (True,)),
}


def run_check(name: str, function: Any, sizes: tuple[Any, ...], kind: dict[str, Any]) -> dict[str, Any]:
    """The row of a check."""
    with poisoned_memory():
        # and in a check an op without a fixed order is an error
        torch.use_deterministic_algorithms(True, warn_only=function is not check)
        return output.judged({"check": name}, function, *sizes, **kind)


def checks() -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Those that run side by side."""
    cu = [0, 0, 13, 500, 1000]
    real = {"gate": None, "constant": False}
    found: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
    for dtype in DTYPES:
        kinds: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("gates of all kinds", (2, 1000, 100), real),
            ("constant gates of all kinds", (2, 777, 64), {"gate": None, "constant": True}),
            ("reverse", (3, 513, 33), {**real, "reverse": True}),
            ("a pack", (1, 1003, 70), {**real, "cu_seqlens": cu}),
            ("recurrent", (2, 300, 96), {**real, "mode": "recurrent"}),
            ("one token", (3, 1, 257), real),
            ("many columns", (8, 600, 2048), real),
            ("near one, long", (1, 16384, 64), {"gate": -1e-6, "constant": False}),
            ("real x, constant phase", (2, 700, 65), {**real, "phase": "constant"}),
            ("real x, varying phase, a pack", (1, 1003, 70), {**real, "phase": "varying", "cu_seqlens": cu}),
        ]
        found += [
            (f"{name} {list(sizes)} {dtype}", check, (*sizes, dtype), kind) for name, sizes, kind in kinds
        ]
    turning: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("constant phase", (2, 1000, 100), {**real, "phase": "constant complex"}),
        ("varying phase", (2, 1000, 100), {**real, "phase": "varying complex"}),
        (
            "constant decay and phase",
            (2, 777, 64),
            {"gate": None, "constant": True, "phase": "constant complex"},
        ),
        ("reverse", (3, 513, 33), {**real, "phase": "constant complex", "reverse": True}),
        ("a pack", (1, 1003, 70), {**real, "phase": "constant complex", "cu_seqlens": cu}),
        ("recurrent", (2, 300, 96), {**real, "phase": "constant complex", "mode": "recurrent"}),
        ("one token", (3, 1, 257), {**real, "phase": "constant complex"}),
        ("many columns", (8, 600, 2048), {**real, "phase": "constant complex"}),
        ("near one, long", (1, 16384, 64), {"gate": -1e-6, "constant": False, "phase": "constant complex"}),
        (
            "constant, near one, long",
            (1, 16384, 64),
            {"gate": -1e-6, "constant": True, "phase": "constant complex"},
        ),
        (
            "varying, near one, long",
            (1, 16384, 64),
            {"gate": -1e-6, "constant": False, "phase": "varying complex"},
        ),
    ]
    for name, sizes, kind in turning:
        found.append((f"complex, {name} {list(sizes)}", check, (*sizes, torch.float32), kind))
    return found + [(name, function, sizes, {}) for name, (function, sizes) in OTHERS.items()]


def speed(B: int, T: int, D: int, kind: Any) -> dict[str, float]:
    """Milliseconds, medians: the passes, and copies of as many bytes as they must read and write."""
    turning, dtype = isinstance(kind, str), torch.float32 if isinstance(kind, str) else kind
    constant = turning and "constant decay" in kind
    tensors = inputs(B, T, D, dtype, gate=-0.1, constant=constant, phase=kind if turning else None)
    g, x, w = tensors["log_decay"], tensors["x"], tensors["weights"]
    call = (g, x, tensors.get("phase"), None, None, False, "parallel", 256)
    out, final = triton_scan.forward(*call)
    d_final = torch.zeros_like(final)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items() if n != "weights"}
    gates = sum(t.numel() * t.element_size() for n, t in tensors.items() if n in ("log_decay", "phase"))
    size = x.numel() * x.element_size() + out.numel() * out.element_size()

    def replayed(function: Any) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return float(do_bench_cudagraph(function, return_mode="median"))

    def copies(count: int) -> float:
        return float(do_bench(timing.copy(count, x.device), return_mode="median"))

    def eager() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_scan(**leaves, backend="triton")[0], list(leaves.values()), w)

    times = {
        "forward": replayed(lambda: triton_scan.forward(*call)),
        "forward floor": copies(size + gates),
        "backward": replayed(lambda: triton_scan.backward(w, d_final, out, final, *call)),
        "backward floor": copies(size + out.numel() * out.element_size() + 2 * gates),
        "forward and backward, eager": float(do_bench(eager, return_mode="median")),
    }
    return {name: round(value, 4) for name, value in times.items()}


def tile_speeds(jobs: int) -> Iterator[dict[str, Any]]:
    """Every tile of CANDIDATES on the largest shape; they are compiled side by side first."""
    cases = [(kind, tile) for kind, tiles in CANDIDATES.items() for tile in tiles]
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        list(pool.map(tile_speed, cases, [True] * len(cases)))
    with ProcessPoolExecutor(1, context) as pool:
        yield from pool.map(tile_speed, cases, [False] * len(cases))


def tile_speed(case: tuple[Any, Any], compile_only: bool) -> dict[str, Any]:
    """The passes with this tile."""
    kind, tile = case
    setattr(triton_scan, "_tile_of", lambda *_: tile)  # noqa: B010
    row: dict[str, Any] = {"kind": str(kind), **tile._asdict()}
    try:
        if not compile_only:
            return row | speed(8, 2048, 2048, kind)
        turning = isinstance(kind, str)
        constant = turning and "constant decay" in kind
        dtype = torch.float32 if turning else kind
        tensors = inputs(1, 2048, 2048, dtype, gate=-0.1, constant=constant, phase=kind if turning else None)
        results(tensors, "triton")
        return row
    except Exception as error:
        return {**row, "why": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Run all checks, then all timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes of the checks")
    parser.add_argument("--only", choices=("checks", "large", "speed", "tiles"), help="one part of it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    log = output.Log(args.json, torch.device("cuda"))
    if args.only in (None, "checks"):
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for row in pool.map(run_check, *zip(*checks(), strict=True)):
                log.add(row)
    if args.only in (None, "large"):
        for name, (function, sizes) in LARGE.items():
            log.add(run_check(name, function, sizes, {}))
            torch.cuda.empty_cache()
    if args.only in (None, "speed"):
        times = log.more["milliseconds"] = []
        for sizes, kind in itertools.product(SPEED, (*DTYPES[:2], *TURNING)):
            log.add({"shape": list(sizes), "kind": str(kind), **speed(*sizes, kind)}, times)
    if args.only == "tiles":
        tiles = log.more["tiles"] = []
        for row in tile_speeds(args.jobs):
            log.add(row, tiles)
    log.finish()


if __name__ == "__main__":
    main()
