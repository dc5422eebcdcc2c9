"""linear_scan and what else computes it: h_t = e^{g_t + i phase_t} h_{t-1} + x_t."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import linear_scan
from .core import Case, Run, Way

LENGTHS = [2**n for n in range(9, 18)]
MILLISECONDS: dict[tuple[object, ...], tuple[float, float]] = {  # to reach on an H200: forward, both
    (8, 2048, 2048, torch.bfloat16): (0.062, 0.19),
    (1, 16384, 2048, torch.bfloat16): (0.065, 0.20),
    (8, 2048, 2048, torch.float32): (0.115, 0.36),
    (8, 2048, 2048, "phase [D]"): (0.22, 0.55),
}


def cases() -> list[Case]:
    """The shapes of the table, then those of the plot: as many elements at every T."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        real(8, 2048, 2048, bf16, cold=True),
        real(8, 2048, 2048, fp32),
        real(1, 16384, 2048, bf16),
        real(1, 131072, 256, bf16),
        real(1, 131072, 256, fp32),
        turning(8, 2048, 2048, "phase [D]", cold=True),
        turning(8, 2048, 2048, "phase [B, T, D]"),
        turning(8, 2048, 2048, "decay [D], phase [D]"),
        turning(1, 16384, 2048, "decay [D], phase [D]"),
        *(real(LENGTHS[-1] // T, T, 256, bf16, plotted=True) for T in LENGTHS),
    ]


def real(B: int, T: int, D: int, dtype: torch.dtype, *, cold: bool = False, plotted: bool = False) -> Case:
    size = B * T * D * dtype.itemsize

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return (
            (-torch.rand(B, T, D, device=device)).to(dtype),
            torch.randn(B, T, D, device=device).to(dtype),
        )

    def gates(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return g.float().exp().to(g.dtype), x

    def gates_in_rows(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2).contiguous() for t in gates(g, x))

    return Case(
        f"{'over T: ' if plotted else ''}real [{B}, {T}, {D}] {_name(dtype)}",
        inputs,
        [
            Way("ours", lambda: lambda g, x: linear_scan(g, x)[0]),
            Way("fla chunk_hgrn", _fla("chunk_hgrn")),
            Way("fla fused_recurrent_hgrn", _fla("fused_recurrent_hgrn")),
            Way("accelerated-scan scalar, [B, D, T]", _accelerated("scalar"), gates_in_rows, _in_columns),
            Way("accelerated-scan warp, [B, D, T]", _accelerated("warp"), gates_in_rows, _in_columns),
            Way("torch associative_scan", associative_scan, gates),
        ],
        lambda g, x: linear_scan(g, x, backend="torch")[0],
        (3 * size, 8 * size),
        MILLISECONDS.get((B, T, D, dtype), (None, None)) if not plotted else (None, None),
        T if plotted else None,
        cold,
    )


def turning(B: int, T: int, D: int, kind: str, *, cold: bool = False) -> Case:
    """Complex, float32; what is constant in time is [D], the phase of HGRU and both in LRU."""
    decay_shape = (D,) if "decay [D]" in kind else (B, T, D)
    phase_shape = (D,) if "phase [D]" in kind else (B, T, D)
    number = 4 * B * T * D  # bytes of a real number for each x
    gate = number * (len(decay_shape) == 3) + number * (len(phase_shape) == 3)

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return (
            -torch.rand(decay_shape, device=device),
            torch.randn(B, T, D, dtype=torch.complex64, device=device),
            torch.rand(phase_shape, device=device),
        )

    def gates(g: Tensor, x: Tensor, phase: Tensor) -> tuple[Tensor, ...]:
        return torch.polar(*torch.broadcast_tensors(g.exp(), phase)).expand(x.shape), x

    def gates_in_rows(g: Tensor, x: Tensor, phase: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2).contiguous() for t in gates(g, x, phase))

    return Case(
        f"complex, {kind} [{B}, {T}, {D}] float32",
        inputs,
        [
            Way("ours", lambda: lambda g, x, phase: linear_scan(g, x, phase=phase)[0]),
            Way("accelerated-scan complex, [B, D, T]", _accelerated("complex"), gates_in_rows, _in_columns),
            Way("torch associative_scan", associative_scan, gates),
        ],
        lambda g, x, phase: linear_scan(g, x, phase=phase, backend="torch")[0],
        (gate + 4 * number, 3 * gate + 10 * number),
        MILLISECONDS.get((B, T, D, kind), (None, None)),
        cold=cold,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_columns(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


def _fla(name: str) -> Callable[[], Run]:
    def load() -> Run:
        from fla.ops import hgrn

        op = getattr(hgrn, name)
        return lambda g, x: op(x, g)[0]

    return load


def _accelerated(name: str) -> Callable[[], Run]:
    def load() -> Run:
        import importlib

        return importlib.import_module(f"accelerated_scan.{name}").scan

    return load


def associative_scan() -> Run:
    """torch's own, of gates and inputs of one dtype."""
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lambda a, x: scan(combine, (a, x), 1, combine_mode="generic")[1]
