"""gated_linear_attention in plain torch: chunks of C tokens, matrix products inside, a recurrence between.

Inside a chunk with incoming state S (P prefix and X suffix sums of its gates, see decays.py):

    o = (q e^P) S + A v        A_ij = sum_k q_ik k_jk e^{gates j+1 .. i}, j <= i        S' = e^{P_C} S + (k e^X)^T v

The parallel mode is one chunk; the recurrent mode never forms A. Shapes inside: R query heads a group, M chunks,
q [B, G, R, M, C, K], k, v, gates [B, G, 1, M, C, .], states [B, G, 1, M, K, V].
"""

import torch
from torch import Tensor

from ..checks import state_dtype
from ..linear_scan.reference import split_decay
from .chunks import Chunks
from .decays import Sums, corner, halves, pair_decay
from .reference import per_channel

Optional = Tensor | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    scale: float,
    mode: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    chunks = Chunks.of(q, cu_seqlens, {"parallel": q.shape[1], "chunked": chunk_size, "recurrent": 1}[mode])
    q_, k_, v_, g = _chunked(chunks, q, k, v, log_decay, scale)
    states = chunks.states(initial_state, k_, v_)
    if mode == "recurrent":
        out, final = _recurrent(chunks, q_, k_, v_, g, states)
    else:
        sums = None if g is None else Sums(g)
        attention = _attention(q_, k_, sums)
        incoming, final = _carry(chunks, k_, v_, sums, states)
        out = attention @ v_ + (_decayed(q_, sums and sums.prefix) @ incoming)
    return chunks.tokens(out.flatten(1, 2)).to(v.dtype), final.clone()


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    out: Tensor,
    final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    scale: float,
    mode: str,
    chunk_size: int,
) -> tuple[Optional, ...]:
    """Recomputes the states between chunks, runs their gradients backwards, and needs no division by a gate:
    within a chunk d gates = reverse cumsum of (q dq - k dk), plus what its last state owes to the future."""
    chunks = Chunks.of(q, cu_seqlens, q.shape[1] if mode == "parallel" else max(chunk_size, 16))
    q_, k_, v_, g = _chunked(chunks, q, k, v, log_decay, scale)
    sums = None if g is None else Sums(g)
    do = chunks.rows(grad_out.to(q_.dtype)).unflatten(1, q_.shape[1:3])
    d_attention = do @ v_.mT
    attention, dq, dk = _attention_backward(q_, k_, sums, d_attention)
    dv = _over_queries(attention.mT @ do)
    states = chunks.states(initial_state, k_, v_)
    incoming, _ = _carry(chunks, k_, v_, sums, states)

    prefix, suffix = (None, None) if sums is None else (sums.prefix, sums.suffix)
    decayed_q, decayed_k = _decayed(q_, prefix), _decayed(k_, suffix)
    dq += _decayed(do @ incoming.mT, prefix)
    arriving = _over_queries(decayed_q.mT @ do)
    decay = None if prefix is None else prefix[..., -1:, :].mT.exp()
    outgoing, d_initial = chunks.carry_back(arriving, decay, grad_final.to(q_.dtype))
    dv += decayed_k @ outgoing
    dk += _decayed(v_ @ outgoing.mT, suffix)

    dg = None
    if log_decay is not None:
        assert g is not None and decay is not None
        last = (incoming * decay + decayed_k.mT @ v_) * outgoing
        dg = _gate_gradient(_over_queries(q_ * dq) - k_ * dk, last.sum(-1), g)
        dg = chunks.tokens(dg[:, :, 0]).masked_fill(~chunks.valid_tokens(dg), 0)
        dg = dg if log_decay.dim() == 4 else dg[..., 0]
        dg = (dg.sum((0, 1)) if log_decay.dim() == 1 else dg).to(log_decay.dtype)
    return (
        (chunks.tokens(dq.flatten(1, 2)) * scale).to(q.dtype),
        chunks.tokens(dk[:, :, 0]).to(k.dtype),
        chunks.tokens(dv[:, :, 0]).to(v.dtype),
        dg,
        None if initial_state is None else d_initial.to(initial_state.dtype),
        None,
    )


def _chunked(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, log_decay: Optional, scale: float
) -> tuple[Tensor, Tensor, Tensor, Optional]:
    dtype = state_dtype(q.dtype)
    heads, groups = q.shape[2], k.shape[2]
    g = log_decay
    if g is not None:
        g = per_channel(g, *q.shape[:2], 1) if g.dim() < 4 else g
        g = chunks.rows(g.to(dtype))[:, :, None]
    q_ = chunks.rows(q.to(dtype)).unflatten(1, (groups, heads // groups)) * scale
    return q_, chunks.rows(k.to(dtype))[:, :, None], chunks.rows(v.to(dtype))[:, :, None], g


def _decayed(x: Tensor, logs: Optional) -> Tensor:
    return x if logs is None else x * logs.exp()


def _over_queries(x: Tensor) -> Tensor:
    """Sum over the query heads that share a group."""
    return x if x.shape[2] == 1 else x.sum(2, keepdim=True)


def _per_channel(sums: Sums | None) -> bool:
    return sums is not None and sums.prefix.shape[-1] > 1


def _attention(q: Tensor, k: Tensor, sums: Sums | None) -> Tensor:
    """A [B, G, R, M, C, C]; runs `sums` to the whole chunk."""
    if not _per_channel(sums):
        return (q @ k.mT) * _pair_decay(sums, q)
    assert sums is not None
    attention = q.new_zeros(*q.shape[:-1], q.shape[-2])
    attention.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for half, prefix, suffix in sums.levels():
        queries, keys = halves(q, half)[1] * prefix.exp(), halves(k, half)[0] * suffix.exp()
        corner(attention, half).copy_(_products(queries, keys))
    return attention


def _attention_backward(
    q: Tensor, k: Tensor, sums: Sums | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A again, and the gradients of q and k through it."""
    if not _per_channel(sums):
        decay = _pair_decay(sums, q)
        grad = grad * decay
        return (q @ k.mT) * decay, grad @ k, _over_queries(grad.mT @ q)
    assert sums is not None
    attention = q.new_zeros(*q.shape[:-1], q.shape[-2])
    attention.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    own = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk = own * k, _over_queries(own * q)
    for half, prefix, suffix in sums.levels():
        prefix, suffix = prefix.exp(), suffix.exp()
        queries, keys = halves(q, half)[1] * prefix, halves(k, half)[0] * suffix
        part = corner(grad, half)
        corner(attention, half).copy_(_products(queries, keys))
        if half == 1:
            from_keys, from_queries = part * keys, part * queries
        else:
            from_keys, from_queries = part @ keys, part.mT @ queries
        halves(dq, half)[1].addcmul_(from_keys, prefix)
        halves(dk, half)[0].addcmul_(_over_queries(from_queries), suffix)
    return attention, dq, dk


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries * keys).sum(-1, keepdim=True) if queries.shape[-2] == 1 else queries @ keys.mT


def _pair_decay(sums: Sums | None, like: Tensor) -> Tensor:
    if sums is None:
        return pair_decay(None, like)
    decay = pair_decay(sums.prefix, like)
    for _ in sums.levels():
        pass
    return decay


def _carry(chunks: Chunks, k: Tensor, v: Tensor, sums: Sums | None, states: Tensor) -> tuple[Tensor, Tensor]:
    """The state before every chunk [B, G, 1, M, K, V], and the final states."""
    inputs = _decayed(k, sums and sums.suffix).mT @ v
    decay = None if sums is None else sums.prefix[..., -1:, :].mT.exp()
    return chunks.carry(inputs, decay, states)


def _gate_gradient(differences: Tensor, last: Tensor, g: Tensor) -> Tensor:
    """Reverse cumsum in the chunk of q dq - k dk, from `last`; the derivative at a gate of -inf is 0."""
    if g.shape[-1] == 1:
        differences, last = differences.sum(-1, keepdim=True), last.sum(-1, keepdim=True)
    differences[..., -1, :] += last
    return differences.flip(-2).cumsum(-2).flip(-2).masked_fill(g == -torch.inf, 0)


def _recurrent(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Optional, states: Tensor
) -> tuple[Tensor, Tensor]:
    decay, residual = (None, None) if g is None else split_decay(g, None)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])

    def step(m: int, s: Tensor) -> Tensor:
        new = k[:, :, :, m].mT @ v[:, :, :, m]
        if decay is not None and residual is not None:
            new.addcmul_(residual[:, :, :, m].mT, s).addcmul_(decay[:, :, :, m].mT, s)
        else:
            new += s
        out[:, :, :, m] = q[:, :, :, m] @ new
        return new

    return out, chunks.walk(step, states)
