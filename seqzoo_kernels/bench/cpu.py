"""Every op in a few shapes for a CPU, beside its peers; a GPU runs the same.

Every result is first compared with a float64 reference; a wrong one is not timed. Times are medians, in milliseconds, of
runs taken in turn, so that a slow moment of the machine falls on all of them. `target` is the ratio, peer / ours, to reach.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import AttentionState, attention, gated_linear_attention, linear_scan, precision
from . import timing
from .linear_scan import associative_scan

Run = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """Ours and peers, functions of the same inputs to one output; timed with their gradients unless `forward_only`."""

    name: str
    inputs: Callable[[torch.device], Sequence[Tensor]]
    ours: Run
    peers: dict[str, Run]
    targets: dict[str, float]
    exact: Run | None = None
    forward_only: bool = False


def cases() -> list[Case]:
    """The CPU table; a GPU runs the same ops."""
    return [
        Case(
            "real scan [4, 2048, 512]",
            lambda d: (-torch.rand(4, 2048, 512, device=d), torch.randn(4, 2048, 512, device=d)),
            lambda g, x: linear_scan(g, x)[0],
            {"associative_scan": lambda g, x: _associative_scan(g.exp(), x), "loop over unbind": _loop},
            {"associative_scan": 4.0},
            lambda g, x: linear_scan(g, x, backend="reference")[0],
        ),
        Case(
            "complex scan [4, 2048, 512]",
            lambda d: (
                -torch.rand(4, 2048, 512, device=d),
                torch.randn(4, 2048, 512, dtype=torch.complex64, device=d),
                torch.rand(512, device=d),
            ),
            lambda g, x, phase: linear_scan(g, x, phase=phase)[0],
            {
                "associative_scan": lambda g, x, p: _associative_scan(
                    g.exp() * torch.polar(torch.ones_like(p), p), x
                )
            },
            {"associative_scan": 3.0},
            lambda g, x, phase: linear_scan(g, x, phase=phase, backend="reference")[0],
        ),
        *(
            Case(
                f"gated linear attention, {kind} [2, 2048, 4, 64, 64]",
                lambda d, shape=shape: (  # type: ignore[misc]
                    *(torch.randn(2, 2048, 4, 64, device=d) for _ in range(3)),
                    -torch.rand(shape, device=d),
                ),
                lambda q, k, v, g: gated_linear_attention(q, k, v, g)[0],
                {
                    "loop over unbind": _matrix_loop,
                    "causal SDPA (another function)": lambda q, k, v, g: _sdpa(q, k, v) + 0 * g.sum(),
                },
                {"loop over unbind": 8.0, "causal SDPA (another function)": 1.0},
                lambda q, k, v, g: gated_linear_attention(q, k, v, g, backend="reference")[0],
            )
            for kind, shape in (("decay per channel", (2, 2048, 4, 64)), ("decay per head", (2, 2048, 4)))
        ),
        Case(
            "attention [2, 2048, 4, 64]",
            lambda d: tuple(torch.randn(2, 2048, 4, 64, device=d) for _ in range(3)),
            lambda q, k, v: attention(q, k, v)[0],
            {"causal SDPA": _sdpa},
            {"causal SDPA": 0.9},
            lambda q, k, v: attention(q, k, v, backend="reference")[0],
        ),
        *(
            Case(
                f"decode step of attention, cache {slots} x 8 x 64",
                lambda d, slots=slots: (  # type: ignore[misc]
                    *(torch.randn(1, 1, 8, 64, device=d) for _ in range(3)),
                    *(torch.randn(1, slots, 8, 64, device=d) for _ in range(2)),
                ),
                _Decode(),
                {"cat and SDPA": _cat_and_sdpa},
                {"cat and SDPA": 1.0},
                _cat_and_sdpa,
                forward_only=True,
            )
            for slots in (1024, 16384, 65536)
        ),
    ]


def _associative_scan(a: Tensor, x: Tensor) -> Tensor:
    return associative_scan()(a.expand_as(x).to(x.dtype), x)


def _loop(g: Tensor, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for a, x_t in zip(g.exp().unbind(1), x.unbind(1), strict=True):
        h = a * h + x_t
        out.append(h)
    return torch.stack(out, 1)


def _matrix_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    decay = g.exp() if g.dim() == 4 else g.exp()[..., None]
    state, out = k[:, 0, :, :, None] * 0 * v[:, 0, :, None], []
    q = q * q.shape[-1] ** -0.5
    for q_t, k_t, v_t, a in zip(*(x.unbind(1) for x in (q, k, v, decay)), strict=True):
        state = a[..., None] * state + k_t[..., None] * v_t[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(out, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _cat_and_sdpa(q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
    return _sdpa(q, torch.cat([old_k, k], 1), torch.cat([old_v, v], 1), causal=False)


class _Decode:
    """Steps into one cache with room for a token more, whose length is set back each time."""

    def __init__(self) -> None:
        self.state: AttentionState | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
        slots = old_k.shape[1]
        if self.state is None or self.state.k.dtype != k.dtype:
            room_k, room_v = (torch.cat([old, torch.zeros_like(k)], 1) for old in (old_k, old_v))
            self.state = AttentionState(room_k, room_v, torch.full((1,), slots, device=k.device))
        self.state.length.fill_(slots)
        return attention(q, k, v, initial_state=self.state, donate=True)[0]


def _results(run: Run, inputs: Sequence[Tensor], weights: Tensor | None) -> list[Tensor]:
    """The output and, with `weights`, the gradients of sum(weights * output)."""
    if weights is None:
        with torch.no_grad():
            return [run(*inputs)]
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def _error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    return max(precision.relative_error(a, b) for a, b in zip(got, exact, strict=True))


def run_case(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row: errors, medians and ratios."""
    torch.manual_seed(0)
    inputs = case.inputs(device)
    weights = None if case.forward_only else torch.randn_like(case.ours(*inputs))
    exact = case.exact or case.ours
    doubled = [precision.to_float64(t) for t in inputs]
    truth = _results(exact, doubled, None if weights is None else precision.to_float64(weights))
    runs = {"ours": case.ours, **case.peers}
    errors = {name: _error(_results(run, inputs, weights), truth) for name, run in runs.items()}
    wrong = {name: error for name, error in errors.items() if name == "ours" and not error < 1e-4}
    if wrong:
        raise AssertionError(f"{case.name}: wrong results, not timed: {wrong}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            if len(times[name]) > 2 and statistics.median(times[name]) > 0.5:
                continue  # three runs of a slow peer tell enough
            start = timing.now(device)
            _results(run, inputs, weights)
            times[name].append(timing.now(device) - start)
    medians = {name: 1e3 * statistics.median(t[1:]) for name, t in times.items()}
    ratios = {name: medians[name] / medians["ours"] for name in case.peers}
    return {"case": case.name, "ms": medians, "ratio": ratios, "target": case.targets, "error": errors}


def _print(row: dict[str, Any]) -> None:
    print(f"{row['case']:<52} ours {row['ms']['ours']:9.2f} ms   error {row['error']['ours']:.1e}")
    for name, ratio in row["ratio"].items():
        target = row["target"].get(name)
        verdict = (
            "" if target is None else f"   target {target:g}x {'reached' if ratio >= target else 'MISSED'}"
        )
        print(
            f"    {name:<48} {row['ms'][name]:14.2f} ms   error {row['error'][name]:.1e}   {ratio:6.2f}x{verdict}"
        )


def run(device: torch.device, asked: Callable[[str], bool], repeats: int) -> list[dict[str, Any]]:
    """The rows of the cases whose name is asked for, printed as they come."""
    rows = []
    for case in cases():
        if asked(case.name):
            rows.append(run_case(case, device, repeats))
            _print(rows[-1])
    return rows
