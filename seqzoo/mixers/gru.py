"""The gated recurrent unit."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqzoo_kernels import fused_rnn
from seqzoo_kernels.checks import state_dtype
from seqzoo_kernels.gru import gru

from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class GRUState(NamedTuple):
    h: Tensor  # [B, E D]


@register_mixer("gru", paper="arXiv:1406.1078", op="gru")
class GRU(TokenMixer):
    """Gated recurrent unit, whose gates see the state (GRU).

        r_t = sigmoid(x_t W_r + h_{t-1} R_r + b_r)        z_t = sigmoid(x_t W_z + h_{t-1} R_z + b_z)
        h_t = z_t * h_{t-1} + (1 - z_t) * tanh(x_t W_h + b_h + r_t * (h_{t-1} R_h + c))
        y_t = h_t

    Shapes: all vectors are [E D], each W is [D, E D], each R is [E D, E D]. State: h, E D numbers. Weights: with n = E D,
    3 D n + 3 n^2 + 4 n, and n D more for a projection back to D where E > 1. A step costs O(n^2), and waits for the one before.
    All weights start uniform in +-1 / sqrt(n), as those of torch.nn.GRU, so each gate starts near 1/2.

    On a GPU the mode "auto" is cuDNN's for half-precision inputs, computed in float32 with unrounded products; for float32
    inputs cuDNN is not exact enough. Those, float64, compiled models, second derivatives and sequences below 16 tokens go from
    token to token.

    Args:
        dim: width D.
        expand: E, the inner width is E D.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        The reset gate scales the projected state, as in torch.nn.GRU; the paper has it scale the state before the product
        with R_h. Of torch's weights, weight_ih is in_proj.weight and weight_hh is recurrent_weight, with the blocks in the same
        order (r, z, h, where h is what torch calls n); in_proj.bias is bias_ih plus the parts of bias_hh for r and z, and
        recurrent_bias is c, the part of bias_hh for h.

    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    modes = ("chunked", "recurrent")

    def __init__(self, dim: int, *, expand: int = 1, chunk_size: int | None = None) -> None:
        super().__init__(dim)
        if expand < 1:
            raise ValueError(f"gru: expected expand >= 1, got {expand}.")
        self.chunk_size = chunk_size
        self.inner = n = expand * dim
        edge = 1 / math.sqrt(n)
        self.in_proj = nn.Linear(dim, 3 * n)
        self.recurrent_weight = nn.Parameter(torch.empty(3 * n, n))
        self.recurrent_bias = nn.Parameter(torch.empty(n))
        self.out_proj = nn.Linear(n, dim, bias=False) if expand > 1 else None
        for parameter in (*self.in_proj.parameters(), self.recurrent_weight, self.recurrent_bias):
            nn.init.uniform_(parameter, -edge, edge)

    def init_state(self, batch: int, capacity: int | None = None) -> GRUState:
        return GRUState(self.zeros(batch, self.inner))

    def mix(
        self, x: Tensor, state: GRUState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, GRUState]:
        project, weight, bias = self.in_proj, self.recurrent_weight, self.recurrent_bias
        lengths = pack.cu_seqlens, pack.max_seqlen
        if mode == "auto" and fused_rnn.serves("gru", x, project, weight, *lengths):
            h, final = fused_rnn.gru_layer(x, project.weight, project.bias, weight, bias, state.h, *lengths)
        else:
            dtype = state_dtype(x.dtype)
            h, final = gru(
                project(x).to(dtype),
                weight.to(dtype),
                bias.to(dtype),
                initial_state=state.h,
                cu_seqlens=pack.cu_seqlens,
                max_seqlen=pack.max_seqlen,
                mode=mode,
                chunk_size=self.chunk_size,
            )
        y = h.to(x.dtype)
        return y if self.out_proj is None else self.out_proj(y), GRUState(final)
