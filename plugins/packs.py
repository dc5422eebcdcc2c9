"""Documents that stand one behind the other in a row, as positions tell them."""

import torch
from torch import Tensor
from torch.nn import functional as F


def document_starts(positions: Tensor) -> Tensor:
    """cu_seqlens [N + 1] of positions [B, T], read row by row: a document starts where they are 0, and with each row."""
    first = torch.arange(positions.shape[1], device=positions.device) == 0
    starts = ((positions == 0) | first).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel())
