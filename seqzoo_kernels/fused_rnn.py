"""A layer of lstm without peepholes, or of gru, by torch's fused kernels: cuDNN's on a GPU, for lstm also oneDNN's on a CPU.

They walk over the whole sequence in one call, where our loops launch a few kernels a token. Two things of cuDNN's are mended
here, in forward and in backward: it rounds float32 products to TF32 where a global flag lets it, as it does by default, and in
half precision it rounds the state at every token. So all is computed in float32, with unrounded products. What is left of its
error is 7 times what law 8 allows in float32 (measured on an H200), so on a GPU it serves half precision alone.

    y, last_y, last_c = lstm_layer(...)        y, last_h = gru_layer(...)        if serves(...), else the ops lstm and gru

The layer is a function of autograd. Forward keeps the graph that torch makes of its kernel, and backward walks that. Whoever
asks for second derivatives, which cuDNN has not, gets them from our loops.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn
from torch import Tensor, nn
from torch.nn import functional as F

from . import dispatch
from .checks import state_dtype
from .gru import BACKENDS as GRU_BACKENDS
from .gru import gru
from .lstm import BACKENDS as LSTM_BACKENDS
from .lstm import lstm
from .packs import longest_sequence
from .register import traced, without_autocast
from .rows import Rows

BACKENDS: dict[str, Mapping[str, Any]] = {"lstm": LSTM_BACKENDS, "gru": GRU_BACKENDS}
SHORTEST = 16  # tokens on a GPU: to lay out the weights for cuDNN costs as much as a few steps of the loop
HOLD = 1e9  # a logit at which a gate is 0 or 1, and its slope 0, whatever the recurrence adds
_lock = threading.RLock()  # the flag is global, and backward has its own thread


def serves(
    op: str,
    x: Tensor,
    projection: nn.Module,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> bool:
    """Whether a fused kernel computes this call of "lstm" or "gru".

    Not in float64, not where someone wants to see each torch op (a compiler, a transform, a mode) or the projection of the
    inputs by itself (a hook, another module in its place), and not beside a backend that was asked for.
    """
    if torch.compiler.is_compiling() or traced() or state_dtype(x.dtype) != torch.float32:
        return False
    if type(projection) is not nn.Linear or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    if projection._backward_hooks or projection._backward_pre_hooks:
        return False
    if any(type(t) not in (Tensor, nn.Parameter) for t in (x, projection.weight, weight)):
        return False
    rows, length = x.shape[:2]
    if cu_seqlens is not None:
        rows, length = cu_seqlens.shape[0] - 1, longest_sequence(cu_seqlens, max_seqlen, length)
    if not rows or not length or not _has_kernel(op, x, length):
        return False
    return dispatch.pick(op, "auto", {"fused": None, **BACKENDS[op]}) == "fused"


def _has_kernel(op: str, x: Tensor, length: int) -> bool:
    if x.is_cuda:
        cudnn = torch.backends.cudnn
        usable = cudnn.is_available() and cudnn.enabled and torch._use_cudnn_rnn_flatten_weight()
        exact_enough = x.dtype in (torch.bfloat16, torch.float16)
        return (
            usable
            and exact_enough
            and length >= SHORTEST
            and not torch.are_deterministic_algorithms_enabled()
        )
    return x.device.type == "cpu" and op == "lstm" and torch.backends.mkldnn.is_available()


def lstm_layer(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor,
    weight: Tensor,
    y: Tensor,
    c: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op lstm, variant "NP", of the inputs x [B, T, D] in_weight^T + in_bias, from the states y and c [B, n].

    Returns y [B, T, n] in x's dtype, and y and c after the last token.
    """
    dtype, beside = x.dtype, torch.zeros_like(in_bias)
    if cu_seqlens is None:
        out, last_y, last_c = _layer("lstm", x, in_weight, in_bias, weight, beside, y, c)
        return out.to(dtype), last_y, last_c
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    x = rows.split(x).transpose(0, 1)
    # One more input, which marks the padding behind a row: it holds i at 0 and f at 1, so the cell comes through unchanged.
    padding = torch.arange(x.shape[1], device=x.device) >= rows.ends[:, None]
    x = torch.cat([x, padding[..., None].to(dtype)], -1)
    hold = torch.zeros(4, y.shape[1], device=x.device)
    hold[0], hold[1] = -HOLD, HOLD
    in_weight = torch.cat([in_weight.to(torch.float32), hold.reshape(-1, 1)], 1)
    out, _, last_c = _layer("lstm", x, in_weight, in_bias, weight, beside, y, c)
    out, last_y = _joined(rows, out, y)
    return out.to(dtype), last_y, last_c


def gru_layer(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The op gru of the inputs x [B, T, D] in_weight^T + in_bias, from the state h [B, n].

    Returns h [B, T, n] in x's dtype, and h after the last token.
    """
    dtype, beside = x.dtype, F.pad(bias, (2 * bias.shape[0], 0))  # torch has a second bias of every gate
    if cu_seqlens is None:
        out, last = _layer("gru", x, in_weight, in_bias, weight, beside, h)
        return out.to(dtype), last
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    out, _ = _layer("gru", rows.split(x).transpose(0, 1), in_weight, in_bias, weight, beside, h)
    out, last = _joined(rows, out, h)
    return out.to(dtype), last


def _joined(rows: Rows, out: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [N, L, n] as the pack has them, and the last of each row: what it started from, if it is empty."""
    steps = out.transpose(0, 1)
    return rows.join(steps), rows.last(torch.cat([start[None].to(out.dtype), steps]))


def _layer(op: str, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Of a batch, in float32."""
    tensors = [t.to(torch.float32) for t in (x, *others)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return tuple(_Fused.apply(op, *tensors))
    return _run(op, False, _laid_out(op, tensors))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, outs = _with_graph(op, tensors, ctx.needs_input_grad[1:])
        ctx.op, ctx.count, ctx.spent = op, len(tensors), False
        ctx.save_for_backward(*tensors, *leaves, *outs)  # and through `outs` the graph
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        tensors, leaves, outs = saved[: ctx.count], saved[ctx.count : 2 * ctx.count], saved[2 * ctx.count :]
        create_graph = torch.is_grad_enabled()
        if create_graph or traced():
            with torch.enable_grad(), without_autocast(tensors):
                leaves = [t.view_as(t) if need else t for t, need in zip(tensors, needed, strict=True)]
                outs = _loop(ctx.op, *leaves)
        elif (
            ctx.spent
        ):  # one backward pass frees its graph; the next, for which ours was retained, makes another
            leaves, outs = _with_graph(ctx.op, tensors, needed)
        else:
            ctx.spent = True
        pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        with _exact_products(), without_autocast(tensors):
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        results = iter(found)
        return None, *(next(results) if need else None for need in needed)


def _with_graph(
    op: str, tensors: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The layer on copies of its tensors, and torch's graph of that."""
    leaves = _laid_out(op, tensors)
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    with torch.enable_grad():
        return leaves, _run(op, True, leaves)


def _run(op: str, train: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """torch's layer; `tensors` are x, both weights of the inputs, the two of the recurrence, and the states."""
    x, in_weight, in_bias, weight, bias, *start = tensors
    states = [s.contiguous()[None] for s in start]
    has_biases, layers, dropout, bidirectional, batch_first = True, 1, 0.0, False, True
    options = (has_biases, layers, dropout, train, bidirectional, batch_first)
    with _exact_products(), without_autocast(tensors):
        if op == "lstm":
            y, *last = torch.lstm(x, states, [in_weight, weight, in_bias, bias], *options)
        else:
            y, *last = torch.gru(x, states[0], [in_weight, weight, in_bias, bias], *options)
        return y.contiguous(), *(s[0].clone() for s in last)


def _laid_out(op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors cut from their graph, the four of weights side by side in one buffer where cuDNN wants them so."""
    x, *weights = (t.detach() for t in tensors[:5])
    if x.is_cuda:
        weights = [w.clone() for w in weights]
        n = weights[2].shape[1]
        mode = cudnn_rnn.get_cudnn_mode(op.upper())
        order = [weights[0], weights[2], weights[1], weights[3]]
        with torch.no_grad(), torch.cuda.device_of(x):
            torch._cudnn_rnn_flatten_weight(order, 4, x.shape[2], mode, n, 0, 1, True, False)
    return [x, *weights, *(t.detach() for t in tensors[5:])]


def _loop(
    op: str, x: Tensor, in_weight: Tensor, in_bias: Tensor, weight: Tensor, bias: Tensor, *start: Tensor
) -> tuple[Tensor, ...]:
    """The same by our op, which can be differentiated again."""
    inputs = F.linear(x, in_weight, in_bias)
    if op == "lstm":
        y, last = lstm(inputs, weight, variant="NP", initial_state=torch.cat(start, -1))
        return y, *last.chunk(2, -1)
    return gru(inputs, weight, bias[2 * weight.shape[1] :], initial_state=start[0])


@contextmanager
def _exact_products() -> Iterator[None]:
    """Float32 products of cuDNN's recurrent kernels unrounded, whatever the flag says outside."""
    rnn: Any = cudnn_rnn
    with _lock:
        before = rnn.fp32_precision
        rnn.fp32_precision = "ieee"
        try:
            yield
        finally:
            rnn.fp32_precision = before
