"""How long a call takes on a device, what memory it needs, and how long the first one takes.

Between runs on a GPU the L2 cache is overwritten, several times over: that keeps the device busy while the host prepares the
next call, so what is timed is the device's work and not the host's, unless the host takes longer than the overwriting.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

OVERWRITTEN = 2**31  # bytes: half a millisecond
OVERWRITINGS = 6  # a forward and a backward pass by autograd took a slow host more than one
ENOUGH_SECONDS = 1.0  # of one thing timed
COLD_SECONDS = 400
PRODUCT_STEP = 256  # of a product's size, which suits the tiles of a GPU
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")


def now(device: torch.device) -> float:
    """Seconds, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds, the median of `repeats` runs after a warm-up, of fewer where a run is long."""
    for _ in range(3):
        run()
    start = now(device)
    run()
    once = now(device) - start
    repeats = max(3, min(repeats, int(ENOUGH_SECONDS / max(once, 1e-9))))
    times = _device_times(run, repeats, device) if device.type == "cuda" else _times(run, repeats, device)
    return round(statistics.median(times), 4)


def _times(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    times = []
    for _ in range(repeats):
        start = now(device)
        run()
        times.append(1e3 * (now(device) - start))
    return times


def _device_times(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    sink = torch.empty(OVERWRITTEN, dtype=torch.int8, device=device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in marks:
        for _ in range(OVERWRITINGS):
            sink.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in marks]


def copy(size: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes in all."""
    source, target = (torch.ones(size // 2, dtype=torch.int8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def product(operations: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Milliseconds of a square matrix product of about as many operations, two for a multiplication and an addition."""
    size = round((operations / 2) ** (1 / 3))
    size = max(size // PRODUCT_STEP, 1) * PRODUCT_STEP if size >= PRODUCT_STEP else max(size, 1)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return round(median(lambda: a @ b, device, repeats) * operations / (2 * size**3), 4)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `run`, after three runs on a stream of its own, and what it returned: replays write there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making what `run` reads
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def peak_memory(run: Callable[[], object], device: torch.device) -> float | None:
    """MiB that a run needs beside what was there."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def cold_start(op: str, case: str, way: str, device: torch.device) -> dict[str, Any]:
    """`core.first_calls` in a new process whose caches of compiled code are empty."""
    code = (
        "import json, sys, torch; from seqzoo_kernels.bench import core, ops; op, case, way, device = sys.argv[1:]; "
        "case = next(c for c in ops.cases(op) if c.name == case); "
        "print(json.dumps(core.first_calls(case, way, torch.device(device))))"
    )
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, name) for name in CACHES}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, op, case, way, str(device)],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                timeout=COLD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"why cold": f"not done after {COLD_SECONDS} s"}
    if done.returncode:
        return {"why cold": (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])
