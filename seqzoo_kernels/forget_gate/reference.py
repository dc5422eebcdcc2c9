"""forget_gate's equation in torch, as a few functions that no difference of rounded numbers stands between."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import state_dtype

Optional = Tensor | None


def forward(
    logits: Tensor,
    lower_bound: Optional,
    open_part: Optional,
    x: Optional,
    floor: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`floor` is the lower bound where there is no tensor of it."""
    log_f, weight = _gate(logits, floor if lower_bound is None else lower_bound, open_part)
    if x is None:
        return log_f, weight.to(dtype)
    content = (F.silu(x) if silu else x).to(state_dtype(x.dtype))
    return log_f, (content * (weight[..., None] if x.dim() > logits.dim() else weight)).to(dtype)


def _gate(logits: Tensor, gamma: Tensor | float, open_part: Optional) -> tuple[Tensor, Tensor]:
    """log f and 1 - f. Without a bound two functions give both, where the bounded gate takes ten."""
    z = logits.to(state_dtype(logits.dtype))
    if open_part is None and isinstance(gamma, float) and gamma == 0:
        return F.logsigmoid(z), torch.sigmoid(-z)
    rest = 1 - gamma if open_part is None else open_part
    weight = rest * torch.sigmoid(-z)
    f = gamma + rest * torch.sigmoid(z)
    small = weight < 0.5
    log_f = torch.where(
        small,
        torch.log1p(-torch.where(small, weight, 0)),
        torch.where(small, 1, f).clamp_min(torch.finfo(z.dtype).tiny).log(),
    )
    return log_f, weight
