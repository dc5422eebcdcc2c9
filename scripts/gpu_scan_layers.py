"""For gpu_scan.py: whole layers around linear_scan, eager and compiled, and a decoding step of one, eager and as a CUDA graph.

What a layer takes beside its projections and the scan is its gate arithmetic, norm and output gate. `torch.compile` shows what
fusing them gives; copies of the bytes that they must move at least show what is left to gain.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

import seqzoo
from seqzoo_kernels.bench import timing
from seqzoo_kernels.linear_scan import triton as triton_scan

NAMES = ("hgru", "hgru_real", "lru")
B, T, D = 8, 2048, 2048
STEPS = 300


def make(name: str, batch: int = B, length: int = T) -> tuple[torch.nn.Module, Tensor]:
    """A layer in bfloat16, and its input."""
    torch.manual_seed(0)
    layer = seqzoo.create_mixer(name, D).to("cuda", torch.bfloat16)
    return layer, torch.randn(batch, length, D, device="cuda", dtype=torch.bfloat16)


def compiled_is_right(name: str) -> float:
    """Output and input gradient of the compiled layer, beside the eager one: the largest difference over the largest entry."""
    layer, x = make(name)
    weights = torch.randn_like(x)
    found = []
    for run in (layer, torch.compile(layer)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)[0]
        found.append((y.detach(), *torch.autograd.grad(y, leaf, weights)))
        with torch.no_grad():
            run(x)
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    assert max(errors) < 8 * torch.finfo(x.dtype).eps, f"errors {errors}"
    return max(errors)


def all_times() -> list[dict[str, Any]]:
    """A row a layer, and one for decoding."""
    rows = []
    for function, given in (*((layer_times, (name,)) for name in NAMES), (decode_times, ())):
        try:
            rows.append(function(*given))
        except Exception as error:
            rows.append(
                {"layer": "".join(given) or "decode", "why": f"{type(error).__name__}: {error}"[:300]}
            )
    return rows


def layer_times(name: str) -> dict[str, Any]:
    """Milliseconds, medians, of the forward pass without gradients and of both passes."""
    layer, x = make(name)
    leaf, weights = x.clone().requires_grad_(), torch.randn_like(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    row: dict[str, Any] = {"layer": name, "shape": [B, T, D], "dtype": "bfloat16"}

    def both(function: Callable[[Tensor], Tensor]) -> None:
        torch.autograd.grad(function(leaf), [leaf, *parameters], weights, allow_unused=True)

    for label, run in (("eager", layer), ("compiled", torch.compile(layer))):
        with torch.no_grad():
            row[f"{label}, forward"] = _median(lambda run=run: run(x))  # type: ignore[misc]
        row[f"{label}, both"] = _median(lambda run=run: both(lambda t: run(t)[0]))  # type: ignore[misc]
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    widths = {m.in_features: torch.randn(B, T, m.in_features, device="cuda", dtype=x.dtype) for m in linears}
    if linears:
        with torch.no_grad():
            row["projections alone, forward"] = _median(lambda: [m(widths[m.in_features]) for m in linears])
    row |= _scan_alone(name)
    row["copy of a read and a write of a bfloat16 [B, T, D]"] = _median(timing.copy(4 * x.numel(), x.device))
    return row


def _scan_alone(name: str) -> dict[str, float]:
    """The scan with the dtypes that the layer gives it."""
    g = -torch.rand(D if name == "lru" else (B, T, D), device="cuda")  # type: ignore[call-overload]
    complex_state = name != "hgru_real"
    x = torch.randn(B, T, D, device="cuda", dtype=torch.complex64 if complex_state else torch.float32)
    phase = torch.rand(D, device="cuda") if complex_state else None
    call = (g, x, phase, None, None, False, "parallel", 256)
    out, final = triton_scan.forward(*call)
    return {
        "scan alone, forward": _median(lambda: triton_scan.forward(*call)),
        "scan alone, backward": _median(lambda: triton_scan.backward(out, final, out, final, *call)),
    }


@torch.no_grad()
def decode_times() -> dict[str, Any]:
    """Microseconds a step of hgru with B = 1: by the clock, and of a captured graph."""
    layer, x = make("hgru", 1, 1)
    state, x_t = layer.init_state(1), x[:, 0].clone()
    state = _eager_steps(layer, x_t, state, 20)
    torch.cuda.synchronize()
    start = time.perf_counter()
    state = _eager_steps(layer, x_t, state, STEPS)
    torch.cuda.synchronize()
    eager = (time.perf_counter() - start) / STEPS
    graph, _ = timing.captured(lambda: layer.step(x_t, state, donate=True))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    replayed = (time.perf_counter() - start) / STEPS
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    return {
        "layer": "hgru, a step",
        "D": D,
        "B": 1,
        "eager, us": round(1e6 * eager, 1),
        "graph, us": round(1e6 * replayed, 1),
        "MB of weights to read": round(weights / 1e6, 1),
        "copy of as many bytes, us": round(1e3 * _median(timing.copy(weights, x.device)), 1),
    }


def _eager_steps(layer: Any, x_t: Tensor, state: Any, count: int) -> Any:
    for _ in range(count):
        _, state = layer.step(x_t, state, donate=True)
    return state


def _median(function: Callable[[], Any]) -> float:
    return round(float(do_bench(function, return_mode="median")), 4)
