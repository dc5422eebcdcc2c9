"""Long short-term memory and its eight variants."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import fused_rnn
from seqzoo_kernels.checks import state_dtype
from seqzoo_kernels.lstm import CELLS, lstm

from ..layers import check_choice
from ..mixer import ParamRule, Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class LSTMState(NamedTuple):
    c: Tensor  # [B, E D] the cells
    y: Tensor  # [B, E D] the output
    gates: (
        Tensor  # [B, 3 E D] i, f and o of the step before, which the variant "FGR" sees; of width 0 in others
    )


@register_mixer("lstm", paper="arXiv:1503.04069", op="lstm")
class LSTM(TokenMixer):
    """Long short-term memory with peepholes, and its eight variants (LSTM).

        z_t = tanh(x_t W_z + y_{t-1} R_z + b_z)
        i_t = sigmoid(x_t W_i + y_{t-1} R_i + p_i * c_{t-1} + b_i)        f_t likewise
        c_t = f_t * c_{t-1} + i_t * z_t
        o_t = sigmoid(x_t W_o + y_{t-1} R_o + p_o * c_t + b_o)            y_t = o_t * tanh(c_t)

    Shapes: all vectors are [E D], each W is [D, E D], each R is [E D, E D], each peephole p is [E D]. State: c and y, 2 E D
    numbers, and with "FGR" the gates, 5 E D. Weights: 4 (E D^2 + E^2 D^2) + 7 E D of the vanilla cell, and E D^2 more
    for a projection back to D where E > 1. A step costs O(E^2 D^2), and waits for the step before. All weights start uniform in
    +-1 / sqrt(E D), as those of torch.nn.LSTM, so each gate starts near 1/2.

    Args:
        dim: width D.
        expand: E, the inner width is E D.
        variant: "V" is the above. One thing differs in "NIG" (no input gate, i = 1), "NFG" (no forget gate, f = 1), "NOG" (no
            output gate, o = 1), "NIAF" (no tanh of z), "NOAF" (no tanh of c), "CIFG" (f = 1 - i), "NP" (no peepholes, what
            torch.nn.LSTM computes) and "FGR" (every gate also sees i, f and o of the step before, by nine matrices more).
            "NP" is the fast one: in the mode "auto" it is oneDNN's on a CPU, and cuDNN's on a GPU for half-precision inputs,
            computed in float32 with unrounded products; for float32 inputs cuDNN is not exact enough. Those on a GPU, float64,
            compiled models, second derivatives, sequences below 16 tokens on a GPU and all other variants go from token to
            token; on a GPU by one product and one kernel a token, but for "FGR" and float64.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        torch.nn.LSTM is the variant "NP": its weight_ih is in_proj.weight and its weight_hh is recurrent_weight, with the
        blocks in the same order (i, f, z, o, where z is what torch calls g), and in_proj.bias is the sum of its two biases.
        Other variants lack the block of the gate that they lack. The forget gate has no bias of 1 at the start, for the paper
        has none.

    Source: Greff et al. 2015, arXiv:1503.04069.
    """

    modes = ("chunked", "recurrent")

    def __init__(
        self, dim: int, *, expand: int = 1, variant: str = "V", chunk_size: int | None = None
    ) -> None:
        super().__init__(dim)
        check_choice("lstm", "variant", variant, tuple(CELLS))
        if expand < 1:
            raise ValueError(f"lstm: expected expand >= 1, got {expand}.")
        self.variant, self.chunk_size = variant, chunk_size
        self.cell = cell = CELLS[variant]
        self.inner = n = expand * dim
        edge = 1 / math.sqrt(n)
        self.in_proj = nn.Linear(dim, cell.blocks * n)
        self.recurrent_weight = nn.Parameter(torch.empty(cell.blocks * n, n))
        self.peephole = None if variant == "NP" else nn.Parameter(torch.empty(len(cell.gates), n))
        self.gate_weight = nn.Parameter(torch.empty(3 * n, 3 * n)) if cell.feedback else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -edge, edge)
        self.out_proj = nn.Linear(n, dim, bias=False) if expand > 1 else None

    def init_state(self, batch: int, capacity: int | None = None) -> LSTMState:
        gates = self.inner * (self.cell.seen - 1)
        return LSTMState(
            self.zeros(batch, self.inner), self.zeros(batch, self.inner), self.zeros(batch, gates)
        )

    def param_rule(self, name: str, parameter: Tensor) -> ParamRule:
        return ParamRule(decay=False) if name == "peephole" else super().param_rule(name, parameter)

    def mix(
        self, x: Tensor, state: LSTMState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, LSTMState]:
        project, weight = self.in_proj, self.recurrent_weight
        lengths = pack.cu_seqlens, pack.max_seqlen
        plain = self.variant == "NP" and mode == "auto"
        if plain and fused_rnn.serves("lstm", x, project, weight, *lengths):
            start = state.y, state.c
            y, last, c = fused_rnn.lstm_layer(x, project.weight, project.bias, weight, *start, *lengths)
            y = y if self.out_proj is None else self.out_proj(y)
            return y, LSTMState(c, last, state.gates.clone())
        dtype, n = state_dtype(x.dtype), self.inner
        y, final = lstm(
            project(x).to(dtype),
            self._weight().to(dtype),
            None if self.peephole is None else self.peephole.to(dtype),
            variant=self.variant,
            initial_state=torch.cat([state.y, state.gates, state.c], -1),
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        last, gates, c = (part.clone() for part in final.split([n, state.gates.shape[-1], n], -1))
        y = y.to(x.dtype)
        return y if self.out_proj is None else self.out_proj(y), LSTMState(c, last, gates)

    def _weight(self) -> Tensor:
        """What the recurrence sees: y, and with "FGR" the gates, which z does not see."""
        if self.gate_weight is None:
            return self.recurrent_weight
        n = self.inner
        to_gates = torch.cat([self.gate_weight[: 2 * n], F.pad(self.gate_weight[2 * n :], (0, 0, n, 0))])
        return torch.cat([self.recurrent_weight, to_gates], 1)
