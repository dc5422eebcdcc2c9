"""gru in plain torch: two products and a few pointwise passes a step, in buffers that are laid out once.

Forward leaves r, z and the new h' in the place of the inputs and keeps what r scaled, q = h_{t-1} R_h + bias. Backward knows
from them, for all tokens at once, by which factors a step multiplies the gradient of h, so that a step back is one product and
two pointwise passes:

    d (r, z, q) = K_r dh, K_z dh, K_q dh        d h_{t-1} += z dh + d (r, z, q) weight
    K_h = (1 - z)(1 - h'^2)    K_q = r K_h      K_r = q r (1 - r) K_h        K_z = (h_{t-1} - h') z (1 - z)
"""

import torch
from torch import Tensor

from ..rows import Rows

Optional = Tensor | None


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    max_seqlen: int | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = weight.shape[1]
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    gates = rows.split(x).clone(memory_format=torch.contiguous_format)  # [L, N, 3 n]
    length, batch, _ = gates.shape
    h = x.new_empty(length + 1, batch, n)
    q = x.new_empty(length, batch, n)
    h[0] = 0 if initial_state is None else initial_state
    bias = x.new_zeros(n) if bias is None else bias
    for t in range(0, length, chunk_size):
        steps = slice(t, t + chunk_size)
        _walk(gates[steps], h[t : t + chunk_size + 1], q[steps], weight.T, bias)
    final = rows.last(h).clone()
    if cu_seqlens is not None:
        gates, q = (rows.join(part).transpose(0, 1) for part in (gates, q))
    return rows.join(h[1:]), final, gates, q


def _walk(gates: Tensor, h: Tensor, q: Tensor, weight: Tensor, bias: Tensor) -> None:
    """All steps, in place: pre-activations become r, z and h', and states are filled from the first."""
    n = h.shape[-1]
    w_rz, w_h = weight[:, : 2 * n], weight[:, 2 * n :]
    rz, new = gates[..., : 2 * n].unbind(), gates[..., 2 * n :].unbind()
    r, z = gates[..., :n].unbind(), gates[..., n : 2 * n].unbind()
    hs, qs = h.unbind(), q.unbind()
    for t in range(len(qs)):
        rz[t].addmm_(hs[t], w_rz).sigmoid_()
        torch.addmm(bias, hs[t], w_h, out=qs[t])
        new[t].addcmul_(r[t], qs[t]).tanh_()
        torch.lerp(new[t], hs[t], z[t], out=hs[t + 1])


def backward(
    grad_out: Tensor,
    grad_final: Tensor,
    _grad_gates: Tensor,
    _grad_q: Tensor,
    out: Tensor,
    final: Tensor,
    gates: Tensor,
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    initial_state: Optional,
    cu_seqlens: Optional,
    max_seqlen: int | None,
    chunk_size: int,
) -> tuple[Optional, ...]:
    n = weight.shape[1]
    rows = Rows(cu_seqlens, x.shape[1], max_seqlen)
    if cu_seqlens is not None:
        gates, q = (rows.split(part.transpose(0, 1)) for part in (gates, q))
    start = torch.zeros_like(final) if initial_state is None else initial_state
    h = torch.cat([start[None], rows.split(out)])
    r, z, new = gates.split(n, -1)
    k = gates.new_empty(*gates.shape[:2], 3, n)
    k_h = new.square().neg_().add_(1).mul_(1 - z)
    torch.mul(k_h, r, out=k[:, :, 2])
    torch.mul(k[:, :, 2], (1 - r).mul_(q), out=k[:, :, 0])
    torch.mul((h[:-1] - new).mul_(z), 1 - z, out=k[:, :, 1])

    dh = torch.zeros_like(h)
    dh[1:] = rows.split(grad_out)
    rows.add_last(dh, grad_final)
    d = torch.empty_like(k)
    dhs, blocks, steps, flat = dh.unbind(), dh[:, :, None].unbind(), d.unbind(), d.flatten(2).unbind()
    ks, zs = k.unbind(), z.unbind()
    weight = weight.T.contiguous().T  # the layout in which a product adds up most exactly
    for t in reversed(range(len(ks))):
        torch.mul(blocks[t + 1], ks[t], out=steps[t])
        dhs[t].addcmul_(dhs[t + 1], zs[t]).addmm_(flat[t], weight)
    d_weight = d.flatten(2).flatten(0, 1).T @ h[:-1].flatten(0, 1)
    d_bias = None if bias is None else d[:, :, 2].sum((0, 1))
    parts = [part.transpose(0, 1) for part in (d.flatten(2)[..., : 2 * n], k_h.mul_(dh[1:]))]
    dx = torch.cat(parts, -1)  # [N, L, 3 n], as a batch wants it
    if cu_seqlens is not None:
        dx = rows.join(dx.transpose(0, 1))
    return dx, d_weight, d_bias, None if initial_state is None else dh[0].clone(), None
