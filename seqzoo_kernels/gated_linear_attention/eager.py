"""gated_linear_attention in plain torch: chunks of C tokens, matrix products inside, a recurrence between.

Inside a chunk with incoming state S (P prefix and X suffix sums of its gates, see decays.py):

    o = (q e^P) S + A v        A_ij = sum_k q_ik k_jk e^{gates j+1 .. i}, j <= i        S' = e^{P_C} S + (k e^X)^T v

The parallel mode is one chunk; the recurrent mode never forms A. Shapes inside: R query heads a group, M chunks,
q [B, G, R, M, C, K], k, v, gates [B, G, 1, M, C, .], states [B, G, 1, M, K, V].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import state_dtype
from ..stepping import split_decay
from .chunks import Chunks
from .decays import Sums, corner, halves, pair_decay
from .reference import per_channel

Optional = Tensor | None
CHUNK = 32  # tokens, where chunk_size is 0


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
    if mode == "recurrent" and q.shape[1] == 1 and cu_seqlens is None:
        return _one_token(q, k, v, log_decay, initial_state, scale)
    size = {"parallel": q.shape[1], "chunked": chunk_size or CHUNK, "recurrent": 1}[mode]
    chunks = Chunks.of(q, cu_seqlens, size)
    q_, k_, v_, g = _chunked(chunks, q, k, v, log_decay, scale)
    states = chunks.states(initial_state, k_, v_)
    if mode == "recurrent":
        out, final = _recurrent(chunks, q_, k_, v_, g, states)
    else:
        sums = None if g is None else Sums(g)
        out = _attention(q_, k_, sums) @ v_
        decays = Decays.of(sums)
        before, _, final = chunks.carry(_times(k_, decays.suffix).mT @ v_, decays.chunk, states)
        out += _times(q_, decays.prefix) @ before
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
    a gate a channel has, within a chunk, the reverse cumsum of q dq - k dk from what the last state owes to the future."""
    size = min(max(chunk_size or CHUNK, 16), 64)  # whatever the mode: short sums are exact
    chunks = Chunks.of(q, cu_seqlens, size)
    q_, k_, v_, g = _chunked(chunks, q, k, v, log_decay, scale)
    sums = None if g is None else Sums(g)
    do = chunks.rows(grad_out.to(q_.dtype)).unflatten(1, q_.shape[1:3])
    d_attention = do @ v_.mT
    attention, dq, dk = _attention_backward(q_, k_, sums, d_attention)
    dv = _over_queries(attention.mT @ do)

    decays = Decays.of(sums)
    decayed_q, decayed_k = _times(q_, decays.prefix), _times(k_, decays.suffix)
    before, after, _ = chunks.carry(decayed_k.mT @ v_, decays.chunk, chunks.states(initial_state, k_, v_))
    arriving = _over_queries(decayed_q.mT @ do)
    outgoing, d_initial = chunks.carry_back(arriving, decays.chunk, grad_final.to(q_.dtype))
    dq_before, dk_after = _times(do @ before.mT, decays.prefix), _times(v_ @ outgoing.mT, decays.suffix)
    dq, dk, dv = dq.add_(dq_before), dk.add_(dk_after), dv.add_(decayed_k @ outgoing)

    dg = None
    if log_decay is not None:
        assert g is not None
        assert decays.chunk is not None
        if _per_channel(sums):
            differences = _over_queries(q_ * dq).addcmul_(k_, dk, value=-1)
            dg = _channel_gradient(differences, after.mul_(outgoing).sum(-1), g)
        else:
            through = before.mul_(decays.chunk).mul_(outgoing).sum((-2, -1))
            read, written = _over_queries(q_ * dq_before).sum(-1), (k_ * dk_after).sum(-1)
            dg = _head_gradient(_over_queries(attention * d_attention), read, written, through)
        dg = chunks.tokens(dg[:, :, 0])
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
        g = per_channel(g, q.shape[0], q.shape[1], 1) if g.dim() < 4 else g
        g = chunks.rows(g.to(dtype))[:, :, None]
    q_ = chunks.rows(q.to(dtype)).unflatten(1, (groups, heads // groups)) * scale
    return q_, chunks.rows(k.to(dtype))[:, :, None], chunks.rows(v.to(dtype))[:, :, None], g


class Decays(NamedTuple):
    """e^{sums} over a whole chunk: up to each token, after each token, of all; None is no decay."""

    prefix: Optional
    suffix: Optional
    chunk: Optional

    @classmethod
    def of(cls, sums: Sums | None) -> "Decays":
        """Of sums whose levels are done; overwrites them."""
        if sums is None:
            return cls(None, None, None)
        prefix, suffix = sums.prefix.exp_(), sums.suffix.exp_()
        return cls(prefix, suffix, prefix[..., -1:, :].mT)


def _times(x: Tensor, decay: Optional) -> Tensor:
    return x if decay is None else x * decay


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


def _channel_gradient(differences: Tensor, last: Tensor, g: Tensor) -> Tensor:
    """Reverse cumsum in the chunk of q dq - k dk, from `last`; the derivative at a gate of -inf is 0."""
    differences[..., -1, :] += last
    size = g.shape[-2]
    return (g.new_ones(size, size).triu() @ differences).masked_fill_(g == -torch.inf, 0)


def _head_gradient(pairs: Tensor, read: Tensor, written: Tensor, through: Tensor) -> Tensor:
    """Of one gate a head: the sum of all that passes the gate, without a difference.

    `pairs` [..., C, C] is what query i takes from key j, `read` [..., C] what i takes from the state before the chunk,
    `written` [..., C] what j leaves in the state behind it, and `through` [...] what passes the whole chunk.
    """
    ones = pairs.new_ones(pairs.shape[-2:])
    from_here, before_here = ones.triu(), ones.tril(-1)  # [gate, query] and [gate, key]
    total = (from_here @ pairs).mul_(before_here).sum(-1, keepdim=True)
    return total + from_here @ read[..., None] + before_here @ written[..., None] + through[..., None, None]


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Optional, state: Optional, scale: float
) -> tuple[Tensor, Tensor]:
    """The step of a decoder: S = a S + (lost S + k v^T), o = q S, without chunks around it."""
    dtype = state_dtype(q.dtype)
    k_, v_ = k[:, 0].to(dtype), v[:, 0].to(dtype)
    s = k_[..., None] * v_[..., None, :]
    if state is not None:
        state = state.to(dtype)
        if log_decay is None:
            s += state
        else:
            g = log_decay if log_decay.dim() == 1 else log_decay[:, 0]
            decay, lost = (
                t[..., None] if log_decay.dim() == 4 else t[..., None, None] for t in split_decay(g)
            )
            s.addcmul_(lost, state).addcmul_(decay, state)
    q_ = q[:, 0].to(dtype).unflatten(1, (k.shape[2], -1)) * scale
    return (q_ @ s).flatten(1, 2)[:, None].to(v.dtype), s


def _recurrent(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Optional, states: Tensor
) -> tuple[Tensor, Tensor]:
    decay, residual = (None, None) if g is None else split_decay(g)
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
