"""gated_linear_attention's Triton kernels on a GPU: law 8 against float64, bitwise the same twice, and the time of each kernel.

    python scripts/gpu_gla.py [--jobs 12] [--only checks|large|tiles|speed] [--json FILE]

Memory is filled with NaN before every checked call, so that what is not written shows. `tiles` times each kernel with each of
some tiles; `speed` the passes and a decoder's step, replayed as CUDA graphs. Prints a row a case and one summary line; fails
if any check does. Checks run in several processes, for most of their time goes into compiling.
"""

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench, do_bench_cudagraph

from seqzoo.testing import poisoned_memory
from seqzoo_kernels import gated_linear_attention, precision
from seqzoo_kernels.bench import output
from seqzoo_kernels.gated_linear_attention import triton as backend

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
GATES = (0.0, -1e-6, -3e-4, -0.1, -1.0, -20.0, -1e3, -1e9, -torch.inf)
SHAPE = (8, 2048, 16, 128, 128)
TILES = {
    "states": [(64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 1), (128, 64, 4, 2), (64, 128, 8, 2)],
    "outputs": [(64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 1)],
    "d_states": [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 128, 4, 4)],
    "d_values": [(64, 128, 4, 2), (64, 128, 4, 1), (128, 128, 8, 1)],
    "d_keys": [(64, 128, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 128, 8, 1), (64, 128, 4, 2)],
}  # fmt: skip


def inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    *,
    per: str,
    gate: float | None,
    groups: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, log_decay and the weights of the output; gates of all kinds side by side, or like trained ones / `gate`."""
    generator = torch.Generator("cuda").manual_seed(T + K)
    G = groups or H

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tensors = {
        "q": drawn(B, T, H, K),
        "k": drawn(B, T, G, K),
        "v": drawn(B, T, G, V),
        "weights": drawn(B, T, H, V),
    }
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    shape = {"channel": (B, T, G, K), "head": (B, T, G), "constant": (G,)}.get(per)
    if shape:
        g = F.logsigmoid(drawn(*shape))
        if gate is None:
            kinds = torch.tensor(GATES, device="cuda")
            pick = torch.randint(3 * len(GATES), shape, generator=generator, device="cuda")
            g = torch.where(pick < len(GATES), kinds[pick % len(GATES)], g)
        else:
            g = g * gate
        tensors["log_decay"] = g
    return tensors


def results(tensors: dict[str, Tensor], backend: str, **options: Any) -> dict[str, Tensor]:
    """Values, final state and every gradient of a loss that weights the output."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if n != "weights"}
    out, final = gated_linear_attention(**leaves, backend=backend, **options)
    loss = (out.double() * tensors["weights"].double()).sum() + final.double().cos().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {
        "out": out.detach(),
        "final": final.detach(),
        **dict(zip([f"d_{n}" for n in leaves], grads, strict=True)),
    }


def check(*sizes: Any, **kind: Any) -> float:
    """Largest error over what law 8 allows."""
    ends, mode = kind.pop("cu_seqlens", None), kind.pop("mode", "chunked")
    cu = None if ends is None else torch.tensor(ends, device="cuda")
    how = {"cu_seqlens": cu, "reverse": kind.pop("reverse", False)}
    tensors = inputs(*sizes, **kind)
    rows = sizes[0] if cu is None else len(cu) - 1
    tensors["initial_state"] = torch.randn(
        rows, *tensors["k"].shape[2:], tensors["v"].shape[3], device="cuda"
    )
    ours, again = (results(tensors, "triton", mode=mode, **how) for _ in range(2))
    for name, value in ours.items():
        assert torch.equal(value, again[name]), f"{name} differs from run to run"
    doubled = {n: t.double() for n, t in tensors.items()}
    exact = results(doubled, "torch", **how)
    reference = results(tensors, "reference", **how)
    terms = None
    if kind["per"] == "constant":
        spread = {**doubled, "log_decay": doubled["log_decay"].expand(*doubled["k"].shape[:3])}
        terms = results(spread, "torch", **how)["d_log_decay"].abs().sum((0, 1))
    worst, dtype = 0.0, sizes[5]
    for name, wanted in exact.items():
        scale = None
        if name == "d_log_decay":
            scale = precision.log_decay_scale(wanted, doubled["q"], exact["d_q"])
            scale = scale if terms is None else max(scale, precision.largest(terms))
        precision.check_close(ours[name], wanted, reference[name], dtype=dtype, name=name, scale=scale)
        error = (ours[name].double() - wanted).abs().max().item()
        worst = max(worst, error / precision.allowed_error(wanted, reference[name], dtype, scale=scale))
    return worst


def many_elements() -> float:
    """More than 2^31 of them: the first and the last row, values and gradients, are what they are alone, bit for bit."""
    B, T, H, K = 9, 2**17, 16, 128
    tensors = {
        n: torch.empty(B, T, H, K, dtype=torch.bfloat16, device="cuda").normal_() for n in ("q", "k", "v")
    }
    tensors["log_decay"] = torch.empty(B, T, H, device="cuda").uniform_(-1, 0)

    def run(rows: slice) -> tuple[Tensor, ...]:
        own = {n: t[rows].detach().requires_grad_() for n, t in tensors.items()}
        out, _ = gated_linear_attention(**own, backend="triton")
        return out.detach(), *torch.autograd.grad(out, list(own.values()), out.detach())

    whole = run(slice(None))
    for b in (0, B - 1):
        for one, all_ in zip(run(slice(b, b + 1)), whole, strict=True):
            assert torch.equal(one[0], all_[b]), f"row {b} differs"
    return 0.0


def many_sequences() -> float:
    """70,000 sequences in a pack equal the same as a batch."""
    tensors = inputs(70_000, 3, 2, 16, 16, torch.float32, per="channel", gate=1.0)
    tensors.pop("weights")
    rows, _ = gated_linear_attention(**tensors, backend="triton")
    cu = torch.arange(0, 210_001, 3, device="cuda")
    flat = {n: t.flatten(0, 1)[None] for n, t in tensors.items()}
    pack, _ = gated_linear_attention(**flat, cu_seqlens=cu, backend="triton")
    assert torch.equal(pack[0], rows.flatten(0, 1))
    return 0.0


def nothing_new_is_compiled() -> float:
    """Over 50 lengths and 50 packs, after the first few."""
    draw, built = random.Random(0), []

    def run(T: int, cu: list[int] | None) -> None:
        tensors = inputs(1, T, 2, 32, 32, torch.bfloat16, per="channel", gate=1.0)
        results(tensors, "triton", cu_seqlens=None if cu is None else torch.tensor(cu, device="cuda"))

    def pack(T: int) -> list[int]:
        return [0, *sorted(draw.randint(0, T) for _ in range(draw.randint(1, 9))), T]

    for T in (1, 16, 17, 33, 64, 65, 300):
        run(T, None)
        run(T, pack(T))
    triton.knobs.runtime.jit_post_compile_hook = lambda **kind: built.append(kind.get("fn"))
    for _ in range(50):
        T = draw.randint(1, 3000)
        run(T, None)
        run(T, pack(T))
    triton.knobs.runtime.jit_post_compile_hook = None
    assert not built, f"{len(built)} kernels were compiled"
    return 0.0


def run_check(case: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The row of a check."""
    name, function, sizes, kind = case
    with poisoned_memory():
        torch.use_deterministic_algorithms(True)  # and an op without a fixed order is an error
        return output.judged({"check": name}, globals()[function], *sizes, **kind)


def checks() -> list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """All of them, by name."""
    cases: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
    cu = [0, 0, 13, 300, 500]
    for dtype in DTYPES:
        kinds: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("gates of all kinds", (2, 300, 2, 64, 64), {"per": "channel", "gate": None}),
            ("mild gates", (2, 300, 2, 128, 128), {"per": "channel", "gate": 0.06}),
            ("odd widths, grouped", (2, 200, 4, 100, 72), {"per": "channel", "gate": 1.0, "groups": 2}),
            ("wide", (1, 150, 2, 256, 320), {"per": "channel", "gate": 0.06}),
            ("a pack", (1, 503, 2, 64, 32), {"per": "channel", "gate": None, "cu_seqlens": cu}),
            (
                "a pack, reversed",
                (1, 503, 4, 64, 32),
                {"per": "channel", "gate": None, "groups": 2, "cu_seqlens": cu, "reverse": True},
            ),
            ("narrow", (2, 300, 2, 32, 32), {"per": "channel", "gate": None}),
            ("narrow keys, a pack", (1, 503, 2, 16, 48), {"per": "channel", "gate": None, "cu_seqlens": cu}),
            ("narrow values, mild", (2, 130, 2, 128, 16), {"per": "channel", "gate": 0.06}),
            ("one gate a head, narrow", (2, 200, 2, 32, 64), {"per": "head", "gate": None}),
            ("one gate a head", (2, 300, 2, 128, 128), {"per": "head", "gate": None}),
            ("constant gates", (2, 300, 4, 64, 64), {"per": "constant", "gate": 0.06}),
            ("no gate", (2, 300, 4, 64, 64), {"per": "none", "gate": None, "groups": 2}),
            ("recurrent", (2, 70, 2, 64, 100), {"per": "channel", "gate": None, "mode": "recurrent"}),
            ("near one, long", (1, 16384, 1, 32, 32), {"per": "channel", "gate": 1e-6}),
        ]
        cases += [
            (f"{name} {list(sizes)} {dtype}", "check", (*sizes, dtype), kind) for name, sizes, kind in kinds
        ]
    return cases


def tiles(per: str, dtype: torch.dtype, gate: float | None, found: dict[str, Any]) -> None:
    """Milliseconds of each kernel with each tile."""
    size = dtype.itemsize
    kept = backend.TILES[size].copy()
    for name, candidates in TILES.items():
        for candidate in candidates:
            backend.TILES[size] = {**kept, name: candidate}
            try:
                kernels = stages(per, dtype, gate)
                time = do_bench(kernels[name], return_mode="median", warmup=5, rep=25)
            except Exception as error:
                time = f"{type(error).__name__}: {error}"[:80]
            found[f"{per} {dtype} gate {gate} {name} {candidate}"] = time
            print(per, dtype, gate, name, candidate, time, flush=True)
    backend.TILES[size] = kept


def stages(per: str, dtype: torch.dtype, gate: float | None) -> dict[str, Callable[[], Any]]:
    """The launch of each kernel, at the size of the table."""
    tensors = inputs(*SHAPE, dtype, per=per, gate=gate)
    q, k, v, do = (tensors[n] for n in ("q", "k", "v", "weights"))
    call = backend.Call.of(q, k, v, tensors.get("log_decay"), None, 0)
    final = q.new_zeros(call.rows, *call.state_shape, dtype=torch.float32)
    states, mild = backend._states(call, None, final)
    d_states, out, dv, dq, dk = torch.zeros_like(states), *(torch.empty_like(t) for t in (v, v, q, k))
    dg = torch.empty_like(tensors.get("log_decay", q), dtype=torch.float32)
    if dg.dim() < 4:
        dg = dg.expand(8, *dg.shape).contiguous()
    g, chunks = call.g, call.chunks
    launch, scale = backend._launch, SHAPE[3] ** -0.5
    empty = torch.empty_like(final)
    return {
        "states": lambda: backend._states(call, None, final),
        "outputs": lambda: launch(
            backend.outputs_kernel,
            "outputs",
            call,
            call.heads,
            call.V,
            (call.q, k, v, g, states, chunks, mild, out),
            scale=scale,
        ),
        "d_states": lambda: launch(
            backend.d_states_kernel,
            "d_states",
            call,
            call.groups,
            None,
            (q, do, g, final, chunks, call.spans, d_states, empty, empty),
            scale=scale,
            ENDS=False,
        ),
        "d_values": lambda: launch(
            backend.d_values_kernel,
            "d_values",
            call,
            call.groups,
            call.V,
            (q, k, g, do, d_states, chunks, mild, dv),
            scale=scale,
        ),
        "d_keys": lambda: launch(
            backend.d_keys_kernel,
            "d_keys",
            call,
            call.groups,
            call.K,
            (q, k, v, g, do, states, d_states, chunks, mild, dq, dk, dg),
            scale=scale,
            tokens=SHAPE[0] * SHAPE[1],
        ),
    }


def compile_tiles(job: tuple[str, torch.dtype, float | None, str, tuple[int, ...]]) -> None:
    """Compile one kernel with one tile, into the cache that all processes share."""
    per, dtype, gate, name, candidate = job
    backend.TILES[dtype.itemsize] = {**backend.TILES[dtype.itemsize], name: candidate}
    try:
        stages(per, dtype, gate)[name]()
        torch.cuda.synchronize()
    except Exception as error:
        print(job, error)


def speed(per: str, dtype: torch.dtype, gate: float | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds of both passes, each kernel of them replayed in a CUDA graph, and memory on top of inputs and results."""
    tensors = inputs(*shape, dtype, per=per, gate=gate)
    q, k, v, do = (tensors[n] for n in ("q", "k", "v", "weights"))
    call = (q, k, v, tensors.get("log_decay"), None, None, shape[3] ** -0.5, "chunked", 0)
    out, final = backend.forward(*call)
    d_final = torch.zeros_like(final)

    def replayed(function: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return round(float(do_bench_cudagraph(function, return_mode="median")), 4)

    return {
        "shape": list(shape),
        "decay": per,
        "dtype": str(dtype),
        "gate": gate,
        "forward": replayed(lambda: backend.forward(*call)),
        "backward": replayed(lambda: backend.backward(do, d_final, out, final, *call)),
    }


def main() -> None:
    """Run all checks, then all timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=12, help="processes of the checks")
    parser.add_argument("--only", default="checks,large,speed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    only = args.only.split(",")
    times: list[dict[str, Any]] = []
    tiled: dict[str, Any] = {}
    log = output.Log(args.json, torch.device("cuda"), milliseconds=times, tiles=tiled)
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        if "checks" in only:
            for row in pool.map(run_check, checks()):
                log.add(row)
        if "tiles" in only:
            jobs = [
                (per, torch.bfloat16, gate, name, tile)
                for per, gate in (("channel", 0.06),)
                for name, candidates in TILES.items()
                for tile in candidates
            ]
            list(pool.map(compile_tiles, jobs))
    if "large" in only:
        for function in (many_elements, many_sequences, nothing_new_is_compiled):
            log.add(run_check((function.__name__, function.__name__, (), {})))
    if "tiles" in only:
        for per, gate in (("channel", 0.06),):
            tiles(per, torch.bfloat16, gate, tiled)
    if "speed" in only:
        for per, gate in (
            ("channel", 0.06),
            ("channel", 1.0),
            ("channel", None),
            ("head", 1.0),
            ("none", None),
        ):
            log.add(speed(per, torch.bfloat16, gate, SHAPE), times)
        for shape in ((1, 16384, 16, 128, 128), (8, 2048, 32, 64, 64), (8, 2048, 4, 256, 512)):
            log.add(speed("channel", torch.bfloat16, 0.06, shape), times)
        log.add(speed("channel", torch.float32, 0.06, SHAPE), times)
    log.finish()


if __name__ == "__main__":
    main()
