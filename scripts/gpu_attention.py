"""attention's Triton kernels on a GPU: law 8 against float64, bitwise the same twice, tiles swept, pruning timed.

    python scripts/gpu_attention.py [--jobs 12] [--only checks,sweep,speed] [--json FILE]

Memory is filled with NaN before every call of the checks, which run in several processes. Prints a row a case, the fastest
tiles for each shape and pass, and one summary line; fails if any check does.
"""

import argparse
import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from seqzoo.testing import poisoned_memory
from seqzoo_kernels import AttentionState, DecayAttentionState, attention, precision
from seqzoo_kernels.attention import triton as ours
from seqzoo_kernels.bench import output

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATES = (0.0, -1e-6, -3.4e-4, -1.0, -20.0, -100.0, -1e3, -1e6, -1e9, -torch.inf)
SHAPES = ((8, 2048, 16, 128), (1, 16384, 16, 128), (8, 2048, 32, 64), (8, 2048, 8, 256))
TARGETS = {SHAPES[0]: (0.36, 1.45), SHAPES[1]: (2.4, 9.5), SHAPES[2]: (0.52, 2.2)}
CANDIDATES = {
    "forward": [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 1)],
    "query": [(128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 1), (64, 64, 8, 1)],
    "key": [(128, 64, 8, 2), (64, 64, 4, 1), (64, 64, 8, 1), (64, 64, 4, 2), (128, 64, 8, 1)],
}  # fmt: skip


def inputs(
    B: int, T: int, H: int, G: int, K: int, V: int, S: int, dtype: torch.dtype, *, decay: bool
) -> dict[str, Tensor]:
    """q, k, v, the gates of all kinds, and a cache of S slots."""
    generator = torch.Generator("cuda").manual_seed(T + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def gates(*shape: int) -> Tensor:
        mild = F.logsigmoid(torch.randn(shape, generator=generator, device="cuda") + 2)
        pick = torch.randint(20 * len(GATES), shape, generator=generator, device="cuda")
        return torch.where(pick < len(GATES), torch.tensor(GATES, device="cuda")[pick % len(GATES)], mild)

    made = {"q": normal(B, T, H, K), "k": normal(B, T, G, K), "v": normal(B, T, G, V)}
    if decay:
        made["g"] = gates(B, T, H)
    if S:
        made |= {"past_k": normal(B, S, G, K), "past_v": normal(B, S, G, V)}
        if decay:
            made["past_bias"] = gates(B, S, H)
    return made


def results(given: dict[str, Tensor], weights: Tensor, backend: str, **options: Any) -> dict[str, Tensor]:
    """The output and every gradient."""
    leaves = {n: t.detach().requires_grad_() for n, t in given.items()}
    state: AttentionState | DecayAttentionState | None = None
    if "past_k" in leaves:
        length = torch.full((len(leaves["past_k"]),), leaves["past_k"].shape[1], device="cuda")
        state = AttentionState(leaves["past_k"], leaves["past_v"], length)
        if "past_bias" in leaves:
            state = DecayAttentionState(*state, leaves["past_bias"])
    out, _ = attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        leaves.get("g"),
        initial_state=state,
        backend=backend,
        **options,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), weights.to(out.dtype))
    return {"out": out.detach(), **{f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}}


def check(
    B: int, T: int, H: int, G: int, K: int, V: int, S: int, dtype: torch.dtype, **options: Any
) -> float:
    """Largest error over what law 8 allows."""
    given = inputs(B, T, H, G, K, V, S, dtype, decay=options.pop("decay", True))
    cu = options.pop("cu", None)
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, device="cuda")
    weights = torch.randn(B, T, H, V, device="cuda").to(dtype)
    one, again = (results(given, weights, "triton", **options) for _ in range(2))
    for name, value in one.items():
        assert torch.equal(value, again[name]), f"{name} differs from run to run"
    options.pop("prune", None)
    wide = {n: t.double() for n, t in given.items()}
    exact = results(wide, weights.double(), "torch", **options)
    reference = results(given, weights, "reference", **options)
    worst = 0.0
    for name, wanted in exact.items():
        scale = precision.log_decay_scale(wanted, wide["q"], exact["d_q"]) if name == "d_g" else None
        precision.check_close(one[name], wanted, reference[name], dtype=dtype, name=name, scale=scale)
        allowed = precision.allowed_error(wanted, reference[name], dtype, scale=scale)
        worst = max(worst, (one[name].double() - wanted).abs().max().item() / allowed)
    return worst


def far_along(T: int, size: float) -> float:
    """Largest error of the weights of the last keys, after T tokens with gates of about `size`; values read weights out."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, T, 1, 64, generator=generator, device="cuda") for _ in range(2))
    g = -size * torch.rand(1, T, 1, generator=generator, device="cuda")
    v = torch.zeros(1, T, 1, 64, device="cuda")
    v[0, T - 64 :, 0] = torch.eye(64, device="cuda")
    with torch.no_grad():
        got = attention(q, k, v, g, backend="triton")[0][0, -64:, 0].double()
    decay = g.double().flip(1).cumsum(1).flip(1)[0, :, 0]  # from a key on, itself included
    last = torch.arange(T - 64, T, device="cuda")
    sums = F.pad(decay[1:], (0, 1))[None, :] - F.pad(decay[1:], (0, 1))[last, None]
    scores = q[0, last, 0].double() @ k[0, :, 0].double().T / 8 + sums
    later = torch.arange(T, device="cuda")[None] > last[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)[:, T - 64 :]
    error = ((got - weights).abs() / weights.clamp(min=1e-30))[weights > 1e-6].max().item()
    assert error < 1e-4, f"recent weights err by {error:.1e}"
    return error / 1e-4


def step(S: int, dtype: torch.dtype, H: int, G: int, window: int | None) -> float:
    """A decoding step beside float64."""
    given = inputs(3, 1, H, G, 128, 128, S, dtype, decay=True)

    def run(given: dict[str, Tensor], backend: str) -> Tensor:
        length = torch.full((3,), 5 * S if window else S, device="cuda")
        state = DecayAttentionState(given["past_k"], given["past_v"], length, given["past_bias"])
        with torch.no_grad():
            args = (given["q"], given["k"], given["v"], given["g"])
            return attention(*args, initial_state=state, window=window, backend=backend)[0]

    exact = run({n: t.double() for n, t in given.items()}, "torch")
    one, reference = run(given, "triton"), run(given, "reference")
    assert torch.equal(one, run(given, "triton"))
    precision.check_close(one, exact, reference, dtype=dtype, name="out")
    return (one.double() - exact).abs().max().item() / precision.allowed_error(exact, reference, dtype)


def run_check(case: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    name, function, sizes, options = case
    with poisoned_memory():
        return output.judged({"check": name}, function, *sizes, **options)


def cases() -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    made: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
    for dtype in DTYPES:
        kinds: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("decay", (2, 1000, 4, 4, 128, 128, 0), {}),
            ("decay, heads of 64", (2, 513, 4, 4, 64, 64, 0), {}),
            ("decay, grouped, odd sizes", (2, 300, 6, 2, 72, 100, 0), {}),
            ("decay, heads of 256", (1, 300, 2, 2, 256, 256, 0), {}),
            ("decay, heads of 32", (2, 513, 4, 4, 32, 32, 0), {}),
            ("decay, heads of 16, grouped, cache", (2, 200, 4, 2, 16, 48, 77), {}),
            ("plain, heads of 32, window", (2, 300, 4, 2, 32, 32, 0), {"window": 100, "decay": False}),
            ("decay, heads of 256, window", (1, 700, 2, 1, 256, 256, 0), {"window": 150}),
            ("decay, heads of 200, pack", (1, 700, 2, 1, 200, 256, 0), {"cu": [0, 0, 13, 500, 650]}),
            ("decay, window", (2, 777, 4, 2, 64, 64, 0), {"window": 200}),
            ("plain, window", (2, 777, 4, 2, 128, 128, 0), {"window": 129, "decay": False}),
            ("decay, cache", (2, 500, 4, 4, 64, 64, 333), {}),
            ("decay, cache, window", (2, 500, 4, 4, 64, 64, 200), {"window": 200}),
            ("plain, cache", (2, 500, 4, 2, 128, 128, 333), {"decay": False}),
            ("decay, pack", (1, 1003, 4, 4, 64, 64, 0), {"cu": [0, 0, 13, 500, 1000]}),
            ("plain, pack", (1, 1003, 4, 2, 64, 64, 0), {"cu": [0, 0, 13, 500, 1000], "decay": False}),
            ("decay, pruned", (1, 2000, 4, 4, 64, 64, 0), {"prune": 1e-9}),
        ]
        made += [
            (f"{name} {list(sizes)} {dtype}", check, (*sizes, dtype), kind) for name, sizes, kind in kinds
        ]
        for S, H, G, window in ((1000, 4, 4, None), (3000, 8, 2, None), (512, 4, 4, 512)):
            made.append((f"step, {S} slots, {H} heads of {G}, {dtype}", step, (S, dtype, H, G, window), {}))
    made += [(f"131072 tokens, gates of {size}", far_along, (131072, size), {}) for size in (1e-3, 0.1, 10.0)]
    return made


def call(
    shape: tuple[int, ...], gates: Tensor | None = None, prune: float = 0.0
) -> tuple[tuple[Any, ...], Tensor]:
    B, T, H, D = shape
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    g = F.logsigmoid(torch.randn(B, T, H, device="cuda") + 4) if gates is None else gates
    place = torch.arange(T, device="cuda").expand(B, T).contiguous()
    return (q, k, v, g, None, place, place, D**-0.5, 0, 0, prune), do


def time(function: Any) -> float:
    return round(float(do_bench(function, warmup=20, rep=80, return_mode="median")), 4)


def compile_tile(job: tuple[int, str, tuple[int, int, int, int]]) -> None:
    """Into the cache that all processes share; what does not fit shows when it is timed."""
    width, name, tile = job
    ours.TILES[2, width][name] = ours.Tile(*tile)
    with contextlib.suppress(Exception):
        args, do = call((1, 512, 4, width))
        out, lse = ours.forward(*args)
        if name != "forward":
            ours.backward(do, lse, out, lse, *args)
        torch.cuda.synchronize()


def sweep(shape: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds of each tile, for the forward pass and for each part of the backward pass; the fastest stay set."""
    args, do = call(shape)
    key = (2, shape[3])
    out, lse = ours.forward(*args)
    found: dict[str, Any] = {"shape": list(shape)}
    made = ours._Call(*args[:9], args[10])
    q, k, v = args[:3]
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    delta.normal_()
    rows = torch.empty_like(lse)
    parts = {
        "forward": (ours.forward_kernel, (out, lse), ()),
        "query": (ours.query_kernel, (do, lse, delta, dq, rows), do.stride()[:3]),
        "key": (ours.key_kernel, (do, lse, delta, dk, dv, rows), do.stride()[:3]),
    }
    for name, (kernel, tensors, strides) in parts.items():
        times = {}
        for tile in CANDIDATES[name]:
            ours.TILES[key][name] = ours.Tile(*tile)
            try:
                times[tile] = time(partial(made.launch, kernel, name, tensors, strides))
            except Exception as error:  # too much shared memory
                print(name, tile, f"{type(error).__name__}: {error}"[:200])
        order = sorted(times, key=times.__getitem__)
        ours.TILES[key][name] = ours.Tile(*order[0])
        found[name] = [(*tile, times[tile]) for tile in order[:8]]
        print(shape, name, *found[name], flush=True)
    return found


def speed(shape: tuple[int, ...]) -> dict[str, Any]:
    args, do = call(shape)
    out, lse = ours.forward(*args)
    forward = time(lambda: ours.forward(*args))
    both = forward + time(lambda: ours.backward(do, lse, out, lse, *args))
    return {"shape": list(shape), "forward": forward, "both": round(both, 3), "targets": TARGETS.get(shape)}


def pruning() -> Iterator[dict[str, Any]]:
    """Decay times of 10 to 1000 tokens: drawn for each token, and for each head."""
    shape = (1, 16384, 16, 128)
    for name, draws in (("each token", (1, 16384, 16)), ("each head", (1, 1, 16))):
        gates = -1 / (10 * 100 ** torch.rand(draws, device="cuda")).expand(1, 16384, 16).contiguous()
        row: dict[str, Any] = {"decay times drawn for": name}
        for prune in (0.0, 1e-3, 4.5e-5):
            args, do = call(shape, gates, prune)
            out, lse = ours.forward(*args)
            row[f"forward, {prune}"] = time(lambda args=args: ours.forward(*args))  # type: ignore[misc]
            row[f"backward, {prune}"] = time(
                lambda args=args, do=do, out=out, lse=lse: ours.backward(do, lse, out, lse, *args)  # type: ignore[misc]
            )
        yield row


def main() -> None:
    """Run all checks, then the sweep and the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=12, help="processes of the checks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="checks,sweep,speed")
    args = parser.parse_args()
    sweeps: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    pruned: list[dict[str, Any]] = []
    log = output.Log(args.json, torch.device("cuda"), sweeps=sweeps, milliseconds=times, pruning=pruned)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        if "checks" in args.only:
            for row in pool.map(run_check, cases()):
                log.add(row)
        if "sweep" in args.only:
            widths = {shape[3] for shape in SHAPES}
            jobs = [(D, name, tile) for D in widths for name, tiles in CANDIDATES.items() for tile in tiles]
            list(pool.map(compile_tile, jobs))
    if "sweep" in args.only:
        for shape in (SHAPES[0], SHAPES[2], SHAPES[3]):
            log.add(sweep(shape), sweeps)
    if "speed" in args.only:
        for shape in SHAPES:
            log.add(speed(shape), times)
        for row in pruning():
            log.add(row, pruned)
    log.finish()


if __name__ == "__main__":
    main()
