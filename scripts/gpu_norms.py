"""gated_norm's Triton kernels on a GPU: law 8 against float64, bitwise the same twice, and speed beside the floor.

    python scripts/gpu_norms.py [--only checks,speed,tiles] [--jobs 4] [--json FILE]

Memory is filled with NaN before every call of a check, so that what is not written shows. Beside ours stand what mixers called
before, a norm, an activation and a product in torch, the same through torch.compile, and a copy of as many bytes. `tiles`, only
where it is asked for, times backward with other constants. Prints a row a case and one summary line; fails if a check does.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqzoo.testing import poisoned_memory
from seqzoo_kernels import precision
from seqzoo_kernels.bench import output, timing
from seqzoo_kernels.gated_norm import gated_norm, reference
from seqzoo_kernels.gated_norm import triton as backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 50, 2048), (2, 300, 5, 128), (1, 1, 2048), (700, 33), (2, 9, 8192), (2100, 100))
# Shape, norm, dtype of h and whether it is complex: hgru_real, gla, hgrn2 and hgru.
SPEED: tuple[tuple[tuple[int, ...], str, torch.dtype], ...] = (
    ((8, 2048, 2048), "layer", torch.float32),
    ((8, 2048, 16, 128), "rms", torch.bfloat16),
    ((8, 2048, 2048), "rms", torch.bfloat16),
    ((8, 2048, 2048), "layer", torch.complex64),
)
CANDIDATES = tuple(
    itertools.product((1, 2, 3), (4, 8, 16), (256, 512, 1024))
)  # stages, features of a thread, programs
Tensors = list[Tensor | None]


def inputs(shape: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype, norm: str) -> Tensors:
    """h of dtype `kind`, gate, weight, the bias of a layer norm."""
    torch.manual_seed(sum(shape))
    h = torch.randn(shape, device="cuda", dtype=kind)
    real = reference.real_shape(h)
    gate, weight, bias = (torch.randn(s, device="cuda").to(dtype) for s in (real, real[-1:], real[-1:]))
    return [h, 3 * gate, weight, bias if norm == "layer" else None]


def results(tensors: Tensors, cotangent: Tensor, name: str, **options: Any) -> list[Tensor]:
    """y and the gradients of all that is there."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y = gated_norm(*leaves, backend=name, **options)  # type: ignore[arg-type]
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, cotangent.to(y.dtype))]


def share(shape: tuple[int, ...], kind: torch.dtype, dtype: torch.dtype, **options: Any) -> float:
    """Largest error over what law 8 allows; the scale of a parameter's gradient is that of the sum's terms."""
    tensors = inputs(shape, kind, dtype, options["norm"])
    options = {"eps": 1e-5, "act": "silu", **options}
    cotangent = torch.randn(reference.real_shape(tensors[0]), device="cuda").to(dtype)  # type: ignore[arg-type]
    with poisoned_memory():
        ours, again = (results(tensors, cotangent, "triton", dtype=dtype, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "differs from run to run"
    near = results(tensors, cotangent, "reference", dtype=dtype, **options)
    wide = [None if t is None else precision.to_float64(t) for t in tensors]
    exact = results(wide, cotangent, "reference", dtype=torch.float64, **options)
    names = [options[key] for key in ("norm", "eps", "act", "position")]
    (bare,) = reference.forward(*wide[:2], None, None, *names, torch.float64)  # type: ignore[arg-type]
    outer = options["position"] == "pre_gate"
    a = reference.ACTIVATIONS[options["act"]](wide[1]) if outer else torch.ones_like(bare)  # type: ignore[arg-type]
    terms = [
        cotangent.double() * t
        for t, parameter in zip((bare, a), wide[2:], strict=True)
        if parameter is not None
    ]
    scales = [None] * (len(exact) - len(terms)) + [t.abs().flatten(0, -2).sum(0).max().item() for t in terms]
    worst = 0.0
    for value, right, plain, scale in zip(ours, exact, near, scales, strict=True):
        allowed = precision.allowed_error(
            right.cpu(),
            plain.cpu(),
            dtype,
            scale=None if scale is None else max(scale, precision.largest(right)),
        )
        error = (precision.to_float64(value) - right).abs().max().item()
        worst = max(worst, error / allowed if error == error else torch.inf)
    return round(worst, 3)


def check(shape: tuple[int, ...], dtype: torch.dtype, norm: str, position: str) -> dict[str, Any]:
    kinds = {"": dtype, "float32 h": torch.float32, "complex h": torch.complex64}
    if shape[-1] * 2 > 8192:
        del kinds["complex h"]
    found = {what: share(shape, kind, dtype, norm=norm, position=position) for what, kind in kinds.items()}
    return {
        "check": f"{list(shape)} {str(dtype)[6:]} {norm} {position}",
        "passed": all(value <= 1 for value in found.values()),
        "share of the allowed error": found,
    }


def both(tensors: Tensors, call: Callable[..., Tensor], median: Callable[..., float]) -> dict[str, float]:
    """Milliseconds of forward without gradients, and of backward alone."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    with torch.no_grad():
        row = {"forward": median(lambda: call(*leaves))}
    y = call(*leaves)
    wanted, grad = [leaf for leaf in leaves if leaf is not None], torch.randn_like(y)
    row["backward"] = median(lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True))
    return row


def speed(
    shape: tuple[int, ...], norm: str, kind: torch.dtype, median: Callable[..., float]
) -> dict[str, Any]:
    """Ours, torch's, compiled, and copies of the bytes that each pass must read and write."""
    tensors = inputs(shape, kind, torch.bfloat16, norm)
    options = {"norm": norm, "eps": 1e-5, "act": "silu", "dtype": torch.bfloat16}

    def ours(*given: Any) -> Tensor:
        return gated_norm(*given, backend="triton", **options)

    def composed(*given: Any) -> Tensor:
        return gated_norm(*given, backend="torch", **options)

    h, gate, *_ = tensors
    assert h is not None
    assert gate is not None
    h_bytes, bytes_ = h.numel() * h.element_size(), gate.numel() * gate.element_size()
    floor = {"forward": h_bytes + 2 * bytes_, "backward": 2 * h_bytes + 3 * bytes_}
    torch.compiler.reset()
    ways: dict[str, Callable[..., Tensor]] = {
        "ours": ours, "torch": composed, "compiled": torch.compile(composed, dynamic=False),
    }  # fmt: skip
    row: dict[str, Any] = {"shape": list(shape), "norm": norm, "h": str(kind)[6:]}
    row |= {who: both(tensors, call, median) for who, call in ways.items()}
    row["copy"] = {what: median(timing.copy(size, h.device)) for what, size in floor.items()}
    return row


def tiles(
    shape: tuple[int, ...], norm: str, kind: torch.dtype, median: Callable[..., float]
) -> dict[str, Any]:
    """Backward, milliseconds, for each choice of constants."""
    tensors = inputs(shape, kind, torch.bfloat16, norm)
    before = backend.STAGES, backend.EACH, backend.PROGRAMS
    found = {}
    for stages, each, programs in CANDIDATES:
        backend.STAGES, backend.EACH, backend.PROGRAMS = stages, {"forward": each, "backward": each}, programs

        def call(*given: Any) -> Tensor:
            return gated_norm(*given, backend="triton", norm=norm, eps=1e-5, act="silu", dtype=torch.bfloat16)

        found[f"stages {stages}, each {each}, programs {programs}"] = both(tensors, call, median)
    backend.STAGES, backend.EACH, backend.PROGRAMS = before
    return {"shape": list(shape), "norm": norm, "h": str(kind)[6:], "tiles": found}


def main() -> None:
    """Run the checks, then the timings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="checks,speed")
    parser.add_argument("--jobs", type=int, default=4, help="processes of the checks")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    log = output.Log(args.json, device)
    median = functools.partial(timing.median, device=device, repeats=args.repeats)
    parts: list[Callable[..., dict[str, Any]]] = []
    parts += [speed] * ("speed" in args.only) + [tiles] * ("tiles" in args.only)

    def found() -> Iterator[dict[str, Any]]:
        if "checks" in args.only:
            options = itertools.product(SHAPES, DTYPES, ("layer", "rms"), ("pre_gate", "post_gate"))
            with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
                yield from pool.map(check, *zip(*options, strict=True))
        for part, case in itertools.product(parts, SPEED):
            yield part(*case, median)

    for row in found():
        log.add(row)
    log.finish()


if __name__ == "__main__":
    main()
