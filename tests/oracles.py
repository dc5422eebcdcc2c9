"""Oracles: each op twice, written from its equation and from nothing else.

`numpy_*` are loops over t in numpy float64 or complex128, the ground truth of values and final states. `torch_*` are the same
loops in torch float64, whose autograd is the ground truth of gradients; the tests hold them to the numpy ones, and their
gradients to finite differences. Gates of -inf are exact: decays are exponentials of sums of gates, never of differences.

B T D H G K V: batch, time, width, query heads, key heads, key dim, value dim; N sequences of a pack; S slots of a cache.
"""

import numpy as np
import torch
from torch import Tensor

# numpy: values and final states


def numpy_linear_scan(log_decay, x, phase=None, initial_state=None, cu_seqlens=None, reverse=False):
    """h_t = exp(log_decay_t + i phase_t) h_{t-1} + x_t, backwards in time if reverse."""
    B, T, D = x.shape
    decay = np.exp(np.broadcast_to(log_decay, (B, T, D)))
    if phase is not None:
        decay = decay * np.exp(1j * np.broadcast_to(phase, (B, T, D)))
    rows = _spans(cu_seqlens, B, T)
    kind = np.result_type(decay, x)
    out = np.zeros((B, T, D), dtype=kind)
    final = np.zeros((len(rows), D), dtype=kind)
    for n, (b, start, end) in enumerate(rows):
        h = np.zeros(D, dtype=kind) if initial_state is None else initial_state[n].astype(kind)
        steps = range(start, end)
        for t in reversed(steps) if reverse else steps:
            h = decay[b, t] * h + x[b, t]
            out[b, t] = h
        final[n] = h
    return out, final


def numpy_gated_linear_attention(
    q, k, v, log_decay=None, scale=None, initial_state=None, cu_seqlens=None, reverse=False
):  # q [B,T,H,K], k [B,T,G,K], v [B,T,G,V]
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T and out_t = scale q_t S_t, per head; backwards in time if reverse."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    decay = np.ones((B, T, G, K))
    if log_decay is not None and log_decay.ndim == 4:
        decay = np.exp(log_decay)
    elif log_decay is not None:  # [B, T, G] or [G]
        decay = np.exp(np.broadcast_to(log_decay, (B, T, G)))[..., None] * decay
    rows = _spans(cu_seqlens, B, T)
    out = np.zeros((B, T, H, V))
    final = np.zeros((len(rows), G, K, V))
    for n, (b, start, end) in enumerate(rows):
        S = np.zeros((G, K, V)) if initial_state is None else initial_state[n].copy()
        steps = range(start, end)
        for t in reversed(steps) if reverse else steps:
            for g in range(G):
                S[g] = decay[b, t, g][:, None] * S[g] + np.outer(k[b, t, g], v[b, t, g])
            for h in range(H):
                out[b, t, h] = scale * (q[b, t, h] @ S[h // (H // G)])
        final[n] = S
    return out, final


def numpy_attention(
    q, k, v, log_decay=None, scale=None, window=None, past=None, cu_seqlens=None, capacity=None
):  # past: (k, v, length, bias) of earlier tokens
    """softmax_j(scale q_i k_j + sum_{j<s<=i} g_s) v over the last `window` keys; the state's arrays are [N, capacity, ...]."""
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    rows = _spans(cu_seqlens, B, T)
    out = np.zeros((B, T, H, V))
    final_k, final_v = np.zeros((len(rows), capacity, G, K)), np.zeros((len(rows), capacity, G, V))
    final_bias, final_length = np.zeros((len(rows), capacity, H)), np.zeros(len(rows), dtype=np.int64)
    for n, (b, start, end) in enumerate(rows):
        keys, values, bias, positions = [], [], [], []  # one entry a token that can still be seen
        length = 0 if past is None else int(past[2][n])
        for p in range(0 if window is None else max(0, length - window), length):
            slot = p if window is None else p % window
            keys.append(past[0][n, slot])
            values.append(past[1][n, slot])
            bias.append(np.zeros(H) if log_decay is None else past[3][n, slot].astype(np.float64))
            positions.append(p)
        for t in range(start, end):
            gate = np.zeros(H) if log_decay is None else log_decay[b, t]
            bias = [total + gate for total in bias] + [np.zeros(H)]
            keys.append(k[b, t])
            values.append(v[b, t])
            positions.append(length)
            length += 1
            if window is not None:
                keys, values, bias, positions = (
                    entries[-window:] for entries in (keys, values, bias, positions)
                )
            for h in range(H):
                g = h // (H // G)
                scores = np.array(
                    [scale * (q[b, t, h] @ key[g]) + total[h] for key, total in zip(keys, bias, strict=True)]
                )
                weights = np.exp(scores - scores.max())
                out[b, t, h] = (weights / weights.sum()) @ np.array([value[g] for value in values])
        for i, p in enumerate(positions):
            slot = p if window is None else p % window
            final_k[n, slot], final_v[n, slot], final_bias[n, slot] = keys[i], values[i], bias[i]
        final_length[n] = length
    state = (final_k, final_v, final_length)
    return out, state if log_decay is None else (*state, final_bias)


def numpy_causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, cu_seqlens=None):
    """y_t = act(bias + sum_w weight[:, W-1-w] x_{t-w}); the state is the last W - 1 inputs, oldest first."""
    B, T, D = x.shape
    W = weight.shape[1]
    rows = _spans(cu_seqlens, B, T)
    out = np.zeros((B, T, D))
    final = np.zeros((len(rows), W - 1, D))
    for n, (b, start, end) in enumerate(rows):
        tail = np.zeros((W - 1, D)) if initial_state is None else initial_state[n]
        inputs = np.concatenate([tail, x[b, start:end]])
        for t in range(end - start):
            y = np.zeros(D) if bias is None else bias.copy()
            for w in range(W):
                y = y + weight[:, w] * inputs[t + w]
            out[b, start + t] = y / (1 + np.exp(-y)) if activation == "silu" else y
        final[n] = inputs[end - start :]
    return out, final


def _spans(cu_seqlens, B, T):
    """(row, start, end) of each sequence: the rows of the batch, or the sequences of a pack."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    cu = [int(c) for c in cu_seqlens]
    return [(0, start, end) for start, end in zip(cu[:-1], cu[1:], strict=True)]


# torch: the same, differentiable


def _torch_rows(sequence, time_inputs, row_inputs, cu_seqlens, N):
    """Run `sequence` on each row or packed sequence alone; outputs before the first and behind the last one are 0."""
    T = next(x for x in time_inputs if x is not None).shape[1]
    spans = _spans(cu_seqlens, N, T)
    outs, finals = [], []
    for n, (b, start, end) in enumerate(spans):
        pieces = [None if x is None else x[b, start:end] for x in time_inputs]
        out, final = sequence(*pieces, *(None if x is None else x[n] for x in row_inputs))
        outs.append(out)
        finals.append(final)
    if cu_seqlens is not None and outs:
        head, tail = (
            outs[0].new_zeros((n, *outs[0].shape[1:])) for n in (int(cu_seqlens[0]), T - int(cu_seqlens[-1]))
        )
        return torch.cat([head, *outs, tail])[None], finals
    return (torch.stack(outs) if outs else None), finals


def _stack(tensors: list[Tensor], empty: Tensor) -> Tensor:
    return torch.stack(tensors) if tensors else empty


def torch_linear_scan(log_decay, x, phase=None, initial_state=None, cu_seqlens=None, reverse=False):
    B, T, D = x.shape
    kind = torch.complex128 if phase is not None else torch.float64
    log_decay = log_decay.expand(B, T, D)
    phase = None if phase is None else phase.expand(B, T, D)

    def sequence(g, x, phase, h):
        decay = torch.exp(g)
        if phase is not None:
            decay = torch.polar(decay, phase)
        h = x.new_zeros(D, dtype=kind) if h is None else h
        outs = []
        order = range(len(x) - 1, -1, -1) if reverse else range(len(x))
        decays, inputs = decay.unbind(), x.unbind()
        for t in order:
            h = decays[t] * h + inputs[t]
            outs.append(h)
        return _stack(outs[::-1] if reverse else outs, x.new_zeros((0, D), dtype=kind)), h.clone()

    out, finals = _torch_rows(sequence, [log_decay, x, phase], [initial_state], cu_seqlens, B)
    out = x.new_zeros((B, T, D), dtype=kind) if out is None else out
    return out, _stack(finals, x.new_zeros((0, D), dtype=kind))


def torch_gated_linear_attention(
    q, k, v, log_decay=None, scale=None, initial_state=None, cu_seqlens=None, reverse=False
):
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if log_decay is None:
        log_decay = q.new_zeros(G)
    if log_decay.dim() < 4:
        log_decay = log_decay[..., None]
    log_decay = log_decay.expand(B, T, G, K)

    def sequence(q, k, v, g, S):
        S = q.new_zeros((G, K, V)) if S is None else S
        outs = []
        steps = list(zip(q.unbind(), k.unbind(), v.unbind(), g.unbind(), strict=True))
        for q_t, k_t, v_t, g_t in reversed(steps) if reverse else steps:
            S = torch.exp(g_t)[..., None] * S + k_t[..., :, None] * v_t[..., None, :]
            grouped = q_t.reshape(G, H // G, K)
            outs.append(scale * (grouped @ S).reshape(H, V))
        return _stack(outs[::-1] if reverse else outs, q.new_zeros((0, H, V))), S.clone()

    out, finals = _torch_rows(sequence, [q, k, v, log_decay], [initial_state], cu_seqlens, B)
    out = q.new_zeros((B, T, H, V)) if out is None else out
    return out, _stack(finals, q.new_zeros((0, G, K, V)))


def torch_attention(
    q, k, v, log_decay=None, scale=None, window=None, past=None, cu_seqlens=None, capacity=None
):
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    gates = q.new_zeros((B, T, H)) if log_decay is None else log_decay
    past_k, past_v, lengths, past_bias = (*past, None)[:4] if past is not None else (None,) * 4

    def sequence(q, k, v, g, k0, v0, length, bias0):
        L = 0 if length is None else int(length)
        alive = torch.arange(0 if window is None else max(0, L - window), L)  # positions, oldest first
        if L:
            slots = alive if window is None else alive % window
            k, v = torch.cat([k0[slots], k]), torch.cat([v0[slots], v])
        total = bias0[slots] if L and bias0 is not None else q.new_zeros((len(alive), H))  # [keys, H]
        positions = torch.cat([alive, torch.arange(L, L + len(q))])
        outs = []
        for t, (q_t, g_t) in enumerate(zip(q.unbind(), g.unbind(), strict=True)):
            total = torch.cat([total + g_t, q.new_zeros((1, H))])
            n = len(total)
            seen = positions[:n] > L + t - (window or n + L + 1)
            heads = k[:n].repeat_interleave(H // G, dim=1)
            scores = scale * torch.einsum("hk,nhk->nh", q_t, heads) + total
            weights = torch.softmax(torch.where(seen[:, None], scores, -torch.inf), dim=0)
            outs.append(torch.einsum("nh,nhv->hv", weights, v[:n].repeat_interleave(H // G, dim=1)))
        kept = positions if window is None else positions[max(0, len(positions) - window) :]
        slots = kept if window is None else kept % window
        final = []
        for x in (k, v, total):
            spread = x.new_zeros((capacity, *x.shape[1:]))
            final.append(spread.index_put((slots,), x[len(x) - len(kept) :]))
        return _stack(outs, q.new_zeros((0, H, V))), (*final, L + len(q))

    row_inputs = [past_k, past_v, lengths, past_bias]
    out, finals = _torch_rows(sequence, [q, k, v, gates], row_inputs, cu_seqlens, B)
    out = q.new_zeros((B, T, H, V)) if out is None else out
    state = (
        _stack([f[0] for f in finals], q.new_zeros((0, capacity, G, K))),
        _stack([f[1] for f in finals], q.new_zeros((0, capacity, G, V))),
        torch.tensor([f[3] for f in finals], dtype=torch.int64),
    )
    bias = _stack([f[2] for f in finals], q.new_zeros((0, capacity, H)))
    return out, state if log_decay is None else (*state, bias)


def torch_causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, cu_seqlens=None):
    B, T, D = x.shape
    W = weight.shape[1]

    def sequence(x, tail):
        inputs = torch.cat([x.new_zeros((W - 1, D)) if tail is None else tail, x])
        n = len(x)
        y = sum(weight[:, w] * inputs[w : w + n] for w in range(W))
        y = y if bias is None else y + bias
        return (y * torch.sigmoid(y) if activation == "silu" else y), inputs[n:].clone()

    out, finals = _torch_rows(sequence, [x], [initial_state], cu_seqlens, B)
    out = x.new_zeros((B, T, D)) if out is None else out
    return out, _stack(finals, x.new_zeros((0, W - 1, D)))
