"""forget_gate in torch with its gradient written out, which needs nothing but the inputs.

    dz = s (o p / f dlog_f - o p dw)        d gamma = sum of s (dlog_f / f - dw)        d o = -d gamma

with p = sigmoid(z), s = sigmoid(-z), o = 1 - gamma and dw the gradient of the weight 1 - f. Where o is given (`open_part`) it
alone says how open the gate is, f = 1 - o s, and gamma is there to say f more exactly: the gradient is o's.
"""

import torch
from torch import Tensor

from ..checks import state_dtype
from .reference import Optional, forward

__all__ = ["backward", "forward"]


def backward(
    grad_log_f: Tensor,
    grad_u: Tensor,
    logits: Tensor,
    lower_bound: Optional,
    open_part: Optional,
    x: Optional,
    floor: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Optional, ...]:
    state = state_dtype(logits.dtype)
    z = logits.to(state)
    opened, closed = z.sigmoid(), (-z).sigmoid()
    gamma = floor if lower_bound is None else lower_bound
    rest = 1 - gamma if open_part is None else open_part
    d_weight, d_x = grad_u.to(state), None
    if x is not None:
        weight = rest * closed
        d_weight, d_x = _through(d_weight, x, weight[..., None] if x.dim() > z.dim() else weight, silu)
        d_weight = d_weight.sum(-1) if x.dim() > z.dim() else d_weight
    f = gamma + rest * opened
    over_f = torch.where(f < torch.finfo(state).tiny, 0, 1 / f)  # where f is held, its logarithm is too
    if lower_bound is None and open_part is None and floor == 0:
        share = torch.ones_like(z)
    else:
        share = rest * opened * over_f
    d_logits = closed * (share * grad_log_f - rest * opened * d_weight)
    d_gamma, d_open = None, None
    if open_part is not None:
        d_gamma = None if lower_bound is None else torch.zeros_like(lower_bound)
        d_open = _summed(closed * (d_weight - over_f * grad_log_f), open_part)
    elif lower_bound is not None:
        d_gamma = _summed(closed * (over_f * grad_log_f - d_weight), lower_bound)
    return d_logits.to(logits.dtype), d_gamma, d_open, d_x


def _through(grad: Tensor, x: Tensor, weight: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """Of weight * act(x): the gradients of the weight and of x."""
    c = x.to(grad.dtype)
    if not silu:
        return grad * c, (grad * weight).to(x.dtype)
    opened, closed = c.sigmoid(), (-c).sigmoid()
    return grad * (c * opened), (grad * weight * (opened * (1 + c * closed))).to(x.dtype)


def _summed(terms: Tensor, like: Tensor) -> Tensor:
    return terms.to(torch.float64).sum_to_size(like.shape).to(like.dtype)
