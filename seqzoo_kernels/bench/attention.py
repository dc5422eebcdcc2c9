"""attention and what else computes it: softmax attention, with and without a decay, and a step of decoding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import AttentionState, DecayAttentionState, attention
from ..attention import State, xformers
from .core import Case, Run, Way

LENGTHS = [2**n for n in range(9, 16)]
CONTEXTS = [2**n for n in range(10, 18)]
PRUNE = 4.5e-5
MILLISECONDS = {  # to reach on an H200: forward, both
    "forgetting [8, 2048, 16, 128]": (0.36, 1.45),
    "forgetting [1, 16384, 16, 128]": (2.4, 9.5),
    "forgetting [8, 2048, 32, 64]": (0.52, 2.2),
    "softmax [8, 2048, 16, 128]": (0.273, 1.142),
    "softmax [1, 16384, 16, 128]": (1.931, 7.096),
}


def cases() -> list[Case]:
    """Two that a CPU can bear, the shapes of the table, steps, and the passes of the plot: as many tokens at each T."""
    return [
        passes("forgetting", 1, 96, 2, 16, dtype=torch.float32),
        step("forgetting", 96, 2, 2, 16, dtype=torch.float32),
        passes("forgetting", 8, 2048, 16, 128, cold=True),
        passes("forgetting", 1, 16384, 16, 128),
        passes("forgetting", 8, 2048, 32, 64),
        passes("forgetting, decay times of 10 to 1000", 1, 16384, 16, 128),
        passes("softmax", 8, 2048, 16, 128, cold=True),
        passes("softmax", 1, 16384, 16, 128),
        passes("softmax", 128, 128, 16, 128),
        passes("softmax", 32, 512, 16, 128),
        *(step("forgetting", S, 16, 16, 128) for S in CONTEXTS),
        *(step("softmax, grouped", S, 32, 8, 128) for S in CONTEXTS),
        *(passes("forgetting", LENGTHS[-1] // T, T, 16, 128, plotted=True) for T in LENGTHS),
    ]


def passes(
    kind: str,
    B: int,
    T: int,
    H: int,
    D: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cold: bool = False,
    plotted: bool = False,
) -> Case:
    """A whole causal pass. Its products take 4 T^2 D / 2 operations a head, those of its gradients 10 T^2 D / 2."""
    decays = kind.startswith("forgetting")
    name = f"{kind} [{B}, {T}, {H}, {D}]"

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        q, k, v = (torch.randn(B, T, H, D, device=device).to(dtype) for _ in range(3))
        if "times" in kind:
            return q, k, v, (-0.1 / 100 ** torch.rand(1, 1, H, device=device)).repeat(B, T, 1)
        return (q, k, v, F.logsigmoid(torch.randn(B, T, H, device=device) + 4)) if decays else (q, k, v)

    ours = [Way("ours", _attention(copy=False))]  # as the mixers call it; no other way here makes a cache
    if "times" in kind:
        ours += [Way(f"ours, prune={PRUNE}", _attention(prune=PRUNE, copy=False))]
    if decays:
        others = [Way("fla parallel_forgetting_attn", fla)]
        if not plotted:
            others += [Way("flex_attention, gates constant", flex_attention, constants=(3,))]
    else:
        ours += [Way("ours in Triton", _attention(backend="triton", copy=False))]
        others = [
            Way("SDPA cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
            Way("SDPA flash", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
            Way("SDPA as torch chooses", lambda: _sdpa),
            Way("xformers", memory_efficient_attention),
            Way("ours by xformers", _attention(backend="xformers", copy=False)),
        ]
    size, pairs = B * T * H * D * dtype.itemsize, B * H * T * T * D // 2
    return Case(
        f"{'over T: ' if plotted else ''}{name} {str(dtype).removeprefix('torch.')}",
        inputs,
        [*ours, *others],
        lambda *inputs: attention(*inputs, backend="torch")[0],
        (4 * size, 12 * size),
        MILLISECONDS.get(name, (None, None)) if not plotted else (None, None),
        T if plotted else None,
        cold,
        (4 * pairs, 14 * pairs),
        large=dtype != torch.float32,
    )


def step(kind: str, S: int, H: int, G: int, D: int, *, dtype: torch.dtype = torch.bfloat16) -> Case:
    """One query to a full cache of S slots. Its own key takes the place of the oldest: ours writes it, SDPA finds it there."""
    decays = kind.startswith("forgetting")

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        q, *new = (torch.randn(1, 1, heads, D, device=device).to(dtype) for heads in (H, G, G))
        past = [torch.randn(1, S, G, D, device=device).to(dtype) for _ in range(2)]
        length = torch.full((1,), S, device=device)
        if not decays:
            return (length, q, *new, *past)
        gate, *met = F.logsigmoid(torch.randn(1, S + 1, H, device=device) + 4).split([1, S], 1)
        return (length, q, *new, *past, gate, met[0].cumsum(1).flip(1))

    def ours(backend: str, in_place: bool, *inputs: Tensor) -> Tensor:
        length, q, k, v, past_k, past_v, *rest = inputs
        gate = rest[0] if rest else None
        state: State = AttentionState(past_k, past_v, length)
        if rest:
            state = DecayAttentionState(past_k, past_v, length, rest[1])
        options: dict[str, Any] = {"window": S, "backend": backend, "donate": in_place}
        return attention(q, k, v, gate, initial_state=state, **options)[0]

    def in_order(*inputs: Tensor) -> tuple[Tensor, ...]:
        """q, and keys, values and bias [B, H, 1, S] of what it sees."""
        _, q, k, v, past_k, past_v, *rest = inputs
        keys, values = torch.cat([past_k[:, 1:], k], 1), torch.cat([past_v[:, 1:], v], 1)
        if not rest:
            return q, keys, values
        bias = F.pad(rest[1][:, 1:] + rest[0], (0, 0, 0, 1))
        return q, keys, values, bias.transpose(1, 2)[:, :, None].to(q.dtype)

    def way(name: str, backend: str) -> Way:
        return Way(name, lambda: partial(ours, backend, True), _copies, forward_only=True)

    return Case(
        f"step of {kind}, {S} keys of {G} heads for {H}, {D} wide, {str(dtype).removeprefix('torch.')}",
        inputs,
        [
            way("ours", "auto"),
            way("ours by sdpa", "sdpa"),
            Way("SDPA", lambda: _sdpa, in_order, forward_only=True),
        ],
        partial(ours, "torch", False),
        (2 * S * G * D * dtype.itemsize,) * 2,
        large=dtype != torch.float32,
    )


def _copies(*inputs: Tensor) -> tuple[Tensor, ...]:
    """A step in place writes into its inputs."""
    return tuple(t.clone() for t in inputs)


def _attention(**options: Any) -> Callable[[], Run]:
    return lambda: lambda *inputs: attention(*inputs, **options)[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = q.shape[2] > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped
    ).transpose(1, 2)


def sdpa(backend: SDPBackend) -> Run:
    """torch's, by one of its kernels."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v)

    return run


def memory_efficient_attention() -> Run:
    """xformers' own function."""
    operators = xformers.operators()
    mask = operators.fmha.attn_bias.LowerTriangularMask()
    return lambda q, k, v: operators.memory_efficient_attention(q, k, v, mask)


def fla() -> Run:
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    return parallel_forgetting_attn


def flex_attention() -> Run:
    """torch's compiled attention, the decays from cumulative sums; compiled anew for each case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    @torch.compile(dynamic=False)
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Any) -> Tensor:
        c = g.cumsum(1).transpose(1, 2)

        def decayed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + c[b, h, i] - c[b, h, j]

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flex_attention(q, k, v, score_mod=decayed, block_mask=mask)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    masks: dict[int, Any] = {}

    def whole(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        if not q.is_cuda:
            raise RuntimeError("it has no backward pass on a CPU")
        T = q.shape[1]
        if T not in masks:
            masks[T] = create_block_mask(causal, None, None, T, T, device=q.device)
        return run(q, k, v, g, masks[T])

    torch.compiler.reset()
    return whole
