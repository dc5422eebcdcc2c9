"""gated_linear_attention and what else computes it, with softmax attention for scale: whole passes, and a step of decoding.

Kinds of decay: "vector" has one for each key channel, "scalar" for each head, "constant" the fixed ones of RetNet, "no" none.
Gates are float32, like trained ones: those of a vector are log sigmoid(z) / 16, as in GLA, or with "strong" log sigmoid(z), as
in HGRN2, those of a scalar log sigmoid(z), with z normal.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import gated_linear_attention
from .core import Case, Run, Way

LENGTHS = [2**n for n in range(9, 18)]
BATCHES = (1, 64)  # of a decoder
GATES = {"vector": 1 / 16, "strong vector": 1.0, "scalar": 1.0}
FLA = {
    "vector": ("gla", "chunk_gla", "g"),
    "strong vector": ("gla", "chunk_gla", "g"),
    "scalar": ("simple_gla", "chunk_simple_gla", "g"),
    "constant": ("retention", "chunk_retention", None),
    "no": ("linear_attn", "chunk_linear_attn", None),
}
MILLISECONDS = {  # to reach on an H200: forward, both
    "vector decay [8, 2048, 16, 128, 128]": (0.35, 1.4),
    "scalar decay [8, 2048, 16, 128, 128]": (0.18, 0.8),
    "no decay [8, 2048, 16, 128, 128]": (0.17, 0.75),
}


def cases() -> list[Case]:
    """Two that a CPU can bear, the shapes of the table, steps, and the passes of the plot: as many tokens at each T."""
    sizes = [(1, 16384, 16, 128, 128), (8, 2048, 32, 64, 64), (8, 2048, 4, 256, 512)]
    return [
        passes("vector", 2, 2048, 4, 64, 64, dtype=torch.float32),
        step("vector", 2, 4, 64, 64, dtype=torch.float32),
        passes("vector", 8, 2048, 16, 128, 128, cold=True),
        passes("scalar", 8, 2048, 16, 128, 128, cold=True),
        passes("no", 8, 2048, 16, 128, 128, cold=True),
        passes("constant", 8, 2048, 16, 128, 128),
        passes("strong vector", 8, 2048, 16, 128, 128),
        *(passes(kind, *size) for size in sizes for kind in ("vector", "scalar", "no")),
        *(step(kind, B, 16, 128, 128) for kind in ("vector", "scalar") for B in BATCHES),
        *(passes("vector", LENGTHS[-1] // T, T, 16, 128, 128, plotted=True) for T in LENGTHS),
    ]


def passes(
    kind: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cold: bool = False,
    plotted: bool = False,
) -> Case:
    """A whole pass from an empty state, of which only the outputs are wanted."""
    name = f"{kind} decay [{B}, {T}, {H}, {K}, {V}]"

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return _tokens(kind, B, T, H, K, V, dtype, device)

    def arrange(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2) for t in (q, k, v))

    gate = 4 * B * T * H * {"vector": K, "strong vector": K, "scalar": 1}.get(kind, 0)
    keys, values = (B * T * H * width * dtype.itemsize for width in (K, V))
    forward = 2 * keys + 2 * values + gate
    return Case(
        f"{'over T: ' if plotted else ''}{name} {str(dtype).removeprefix('torch.')}",
        inputs,
        [
            Way("ours", lambda: _ours(kind)),
            Way(f"fla {FLA[kind][1]}", _fla(*FLA[kind])),
            Way("softmax attention, SDPA", lambda: softmax, arrange, _transposed, unlike=True),
        ],
        _ours(kind, backend="torch"),
        (forward, 2 * forward + 2 * keys + values + gate),
        MILLISECONDS.get(name, (None, None)) if not plotted else (None, None),
        T if plotted else None,
        cold,
        large=dtype != torch.float32,
    )


def step(kind: str, B: int, H: int, K: int, V: int, *, dtype: torch.dtype = torch.bfloat16) -> Case:
    """One token and a state, as a decoder does: what must move is the state, there and back."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        state = torch.randn(B, H, K, V, device=device)
        return *_tokens(kind, B, 1, H, K, V, dtype, device), state

    def ours(*inputs: Tensor) -> Tensor:
        return gated_linear_attention(*inputs[:4], initial_state=inputs[4], mode="recurrent")[0]

    def exact(*inputs: Tensor) -> Tensor:
        return gated_linear_attention(*inputs[:4], initial_state=inputs[4], backend="torch")[0]

    family, gate = {"vector": ("gla", "gk"), "scalar": ("simple_gla", "g")}[kind]
    name = f"fused_recurrent_{family}"
    return Case(
        f"step, {kind} decay [{B}, 1, {H}, {K}, {V}] {str(dtype).removeprefix('torch.')}",
        inputs,
        [
            Way("ours", lambda: ours, forward_only=True),
            Way(f"fla {name}", _fla(family, name, gate), forward_only=True),
        ],
        exact,
        (8 * B * H * K * V,) * 2,
        large=dtype != torch.float32,
    )


def _tokens(
    kind: str, B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """q, k, v, and the gates where each token has its own."""
    q, k = (torch.randn(B, T, H, K, device=device).to(dtype) for _ in range(2))
    v = torch.randn(B, T, H, V, device=device).to(dtype)
    if kind not in GATES:
        return q, k, v
    shape = (B, T, H) if kind == "scalar" else (B, T, H, K)
    return q, k, v, GATES[kind] * F.logsigmoid(torch.randn(shape, device=device))


def _ours(kind: str, backend: str = "auto") -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> Tensor:
        if kind == "constant":  # of head h, log(1 - 2^{-5 - h})
            g = torch.log1p(-torch.exp2(-5 - torch.arange(q.shape[2], dtype=torch.float32, device=q.device)))
        return gated_linear_attention(q, k, v, g, backend=backend)[0]

    return run


def _fla(family: str, name: str, gate: str | None) -> Callable[[], Run]:
    def load() -> Run:
        op = getattr(importlib.import_module(f"fla.ops.{family}"), name)
        options = {"normalize": False} if family == "linear_attn" else {}

        def run(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, state: Tensor | None = None
        ) -> Tensor:
            gates = {} if gate is None else {gate: g}
            states = {} if state is None else {"initial_state": state, "output_final_state": True}
            return op(q, k, v, **gates, **states, **options)[0]

        return run

    return load


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, [B, H, T, K]; on a GPU by cuDNN, its fastest kernel."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _transposed(out: Tensor) -> Tensor:
    return out.transpose(1, 2)
