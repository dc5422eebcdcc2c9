"""minGRU and minLSTM: gates that do not see the state, so that the recurrence is linear."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import linear_scan
from seqzoo_kernels.checks import state_dtype

from ..layers import check_choice
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer


class MinRNNState(NamedTuple):
    h: Tensor  # [B, E D]


class MinRNN(TokenMixer):
    """What the two have in common: a candidate, a scan with gates from `gates`, a projection."""

    def __init__(
        self,
        dim: int,
        *,
        expand: float,
        candidate_act: str | None,
        bias: bool,
        out_proj: bool,
        chunk_size: int | None,
    ) -> None:
        super().__init__(dim)
        name = type(self).registered_name or type(self).__name__
        check_choice(name, "candidate_act", candidate_act, ("positive", None))
        self.inner = inner = round(expand * dim)
        if inner < 1:
            raise ValueError(f"{name}: expected expand * dim to be at least 1, got expand = {expand}.")
        if inner != dim and not out_proj:
            raise ValueError(
                f"{name}: expected out_proj with expand = {expand}, for y has width dim = {dim}."
            )
        self.candidate_act, self.chunk_size = candidate_act, chunk_size
        self.candidate_proj = nn.Linear(dim, inner, bias=bias)
        self.out_proj = nn.Linear(inner, dim, bias=bias) if out_proj else None

    def init_state(self, batch: int, capacity: int | None = None) -> MinRNNState:
        return MinRNNState(self.zeros(batch, self.inner))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log-decay and the weight of the candidate, in the state's dtype."""
        raise NotImplementedError

    def mix(
        self, x: Tensor, state: MinRNNState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, MinRNNState]:
        log_decay, input_weight = self.gates(x)
        candidate = self.candidate_proj(x).to(input_weight.dtype)
        if self.candidate_act is not None:
            candidate = torch.where(candidate >= 0, candidate + 0.5, torch.sigmoid(candidate))
        h, final = linear_scan(
            log_decay,
            candidate * input_weight,
            initial_state=state.h,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        y = h.to(x.dtype)
        return y if self.out_proj is None else self.out_proj(y), MinRNNState(final)


@register_mixer("min_gru", paper="arXiv:2410.01201", op="linear_scan")
class MinGRU(MinRNN):
    """A GRU whose update gate and candidate depend on the token alone (minGRU).

        z_t = sigmoid(x_t W_z + b_z)        c_t = g(x_t W_c + b_c)
        h_t = (1 - z_t) h_{t-1} + z_t c_t        y_t = h_t W_o + b_o

    g(u) = u + 1/2 for u >= 0 and sigmoid(u) for u < 0 is positive, as a scan over logarithms needs. Here the scan runs over h
    itself, so a state of either sign is right. Shapes: z_t, c_t and h_t are [E D], W_z and W_c are [D, E D], W_o is [E D, D].
    State: h, E D numbers. Weights: 2 E D^2, and E D^2 for W_o, without biases. A step costs O(E D^2), as the projections do.
    Projections start as torch's linear layers do, the decay near 0.5.

    Args:
        dim: width D.
        expand: E, the inner width is E D, rounded.
        candidate_act: "positive" for g (the form in logarithms), or None for g(u) = u (the form without them).
        bias: of the projections.
        out_proj: project h by W_o; without it y = h, and E must be 1.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        minGRU-pytorch, from which many port, has no biases and projects back only where E differs from 1: bias=False,
        out_proj=False. It scans over logarithms, and so needs a state above 0; this does not. The convolution in front of the
        mixer in its language model belongs to the block, not to the mixer.

    Source: Feng et al. 2024, arXiv:2410.01201.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: float = 1.0,
        candidate_act: str | None = "positive",
        bias: bool = True,
        out_proj: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            expand=expand,
            candidate_act=candidate_act,
            bias=bias,
            out_proj=out_proj,
            chunk_size=chunk_size,
        )
        self.update_proj = nn.Linear(dim, self.inner, bias=bias)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.update_proj(x)
        z = z.to(state_dtype(z.dtype))
        return F.logsigmoid(-z), torch.sigmoid(z)


@register_mixer("min_lstm", paper="arXiv:2410.01201", op="linear_scan")
class MinLSTM(MinRNN):
    """An LSTM without output gate whose gates depend on the token alone and add up to 1 (minLSTM).

        f_t = sigmoid(x_t W_f + b_f)        i_t = sigmoid(x_t W_i + b_i)        c_t = g(x_t W_c + b_c)
        h_t = f_t / (f_t + i_t) h_{t-1} + i_t / (f_t + i_t) c_t        y_t = h_t W_o + b_o

    The quotients are the sigmoids of log f_t - log i_t and its negative: nothing is divided, however small both gates are. g is
    that of `min_gru`, and with W_i = -W_f, b_i = -b_f it is that mixer with z_t = i_t. Shapes: f_t, i_t, c_t and h_t are [E D],
    W_f, W_i and W_c are [D, E D], W_o is [E D, D]. State: h, E D numbers. Weights: 3 E D^2, and E D^2 for W_o, without biases.
    A step costs O(E D^2), as the projections do. Projections start as torch's linear layers do, the decay near 0.5.

    Args:
        dim: width D.
        expand: E, the inner width is E D, rounded.
        candidate_act: "positive" for g (the form in logarithms), or None for g(u) = u (the form without them).
        normalize: divide the gates by their sum; without it h_t = f_t h_{t-1} + i_t c_t.
        forget_bias: added to b_f at the start, for longer memory; needs `bias`.
        bias: of the projections.
        out_proj: project h by W_o; without it y = h, and E must be 1.
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        minGRU-pytorch, from which many port, has no biases and projects back only where E differs from 1: bias=False,
        out_proj=False. There a state that comes with more than one token enters as g(h), and with one token as h, so that its
        two paths disagree; here the state is h in every mode, of either sign.

    Source: Feng et al. 2024, arXiv:2410.01201.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: float = 1.0,
        candidate_act: str | None = "positive",
        normalize: bool = True,
        forget_bias: float = 0.0,
        bias: bool = True,
        out_proj: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            expand=expand,
            candidate_act=candidate_act,
            bias=bias,
            out_proj=out_proj,
            chunk_size=chunk_size,
        )
        if forget_bias and not bias:
            raise ValueError(f"min_lstm: expected bias with forget_bias = {forget_bias}.")
        self.normalize = normalize
        self.forget_proj = nn.Linear(dim, self.inner, bias=bias)
        self.input_proj = nn.Linear(dim, self.inner, bias=bias)
        if bias:
            with torch.no_grad():
                self.forget_proj.bias.add_(forget_bias)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, i = self.forget_proj(x), self.input_proj(x)
        f, i = f.to(state_dtype(f.dtype)), i.to(state_dtype(i.dtype))
        if not self.normalize:
            return F.logsigmoid(f), torch.sigmoid(i)
        odds = F.logsigmoid(f) - F.logsigmoid(i)
        return F.logsigmoid(odds), torch.sigmoid(-odds)
