"""RG-LRU, the real-gated linear recurrent unit of Griffin, in its block."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqzoo_kernels import linear_scan
from seqzoo_kernels.checks import state_dtype
from seqzoo_kernels.packs import locate

from ..layers import ShortConv, check_choice, check_divides, largest_divisor
from ..mixer import Shared, TokenMixer
from ..packing import Pack
from ..registry import register_mixer

POWER = 8.0  # c of the paper
SLOWEST, FASTEST = 0.999, 0.9  # decays at the start


class RGLRUState(NamedTuple):
    h: Tensor  # [B, E D]
    conv: Tensor  # [B, conv_size - 1, E D] the last inputs of the short convolution
    length: Tensor  # [B] tokens ever seen


class BlockLinear(nn.Module):
    """A linear map of each of H blocks of the features: weight [H, W / H, W / H], N(0, H / W) at the start, and bias [W], 0."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        block = width // blocks
        self.weight = nn.Parameter(torch.randn(blocks, block, block) / math.sqrt(block))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, self.weight.shape[:2])
        return torch.einsum("bthi,hij->bthj", blocks, self.weight).flatten(-2) + self.bias


@register_mixer("rg_lru", paper="arXiv:2402.19427", op="linear_scan")
class RGLRU(TokenMixer):
    """Real diagonal recurrence whose decay and input are gated, behind a short convolution (RG-LRU, Griffin and Hawk).

        u_t = conv(x_t W_x + b_x)        i_t = sigmoid(u_t W_i + b_i)        r_t = sigmoid(u_t W_r + b_r)
        log a_t = -8 softplus(Lambda) r_t
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t        y_t = (h_t * gelu(x_t W_y + b_y)) W_o + b_o

    W_i and W_r have a block for each head. At the first token of a sequence the weight of the input is 1 instead of sqrt(1 -
    a_t^2), for nothing came before; a state that goes on has no first token, so it counts its tokens. Shapes: u_t, i_t, r_t,
    a_t, h_t and Lambda are [E D], W_x and W_y are [D, E D], W_o is [E D, D], W_i and W_r are [H, E D / H, E D / H]. State: h,
    the last inputs of the convolution and that count, conv_size E D + 1 numbers. Weights: 3 E D^2 + 2 (E D)^2 / H, without
    biases and convolution. A step costs O(E D^2), as the projections do. Projections start as N(0, 1 / inputs), the convolution
    as N(0, 0.01 / conv_size), biases at 0. With the gate r at 1/2 the decay starts between 0.656 and 0.996 (decay_init "code").

    Args:
        dim: width D.
        expand: E, the inner width is E D, rounded.
        num_heads: H, blocks of the gates; by default so many that the block width is the largest divisor of E D up to 256.
        conv_size: taps of the causal convolution; 0 for none.
        decay_init: of Lambda. "code": exp(-softplus(Lambda)), squared, is uniform in [0.9^2, 0.999^2]. "paper": its 8th power,
            which is a_t with r_t = 1, is uniform in [0.9, 0.999].
        scale_first: weigh the first token by sqrt(1 - a_t^2), too (paper).
        chunk_size: tokens a chunk in the chunked mode.

    Raises:
        ValueError: an option's value is not as above.

    Differences:
        The paper says that a_t with r_t = 1 starts uniform in [0.9, 0.999]; its released code, recurrentgemma, takes that
        interval for the 8th root of it and draws its square, and is the default here. The code gives the first token the weight
        1, the paper sqrt(1 - a_t^2). The code bounds the derivative of the square root by 1000; here the gradient is the exact
        one, which in terms of the gates has no pole. The code's models start W_o with 2 / L of the variance here, L the number
        of layers. In a stack with local attention, a window of W here is W tokens with the token itself; in recurrentgemma it
        is W + 1.

    Source: De et al. 2024, arXiv:2402.19427, and its released code.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: float = 1.0,
        num_heads: int | None = None,
        conv_size: int = 4,
        decay_init: str = "code",
        scale_first: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        self.inner = inner = round(expand * dim)
        if inner < 1 or conv_size < 0:
            raise ValueError(
                f"rg_lru: expected expand * dim >= 1 and conv_size >= 0, got expand = {expand} and {conv_size}."
            )
        self.num_heads = inner // largest_divisor(inner, at_most=256) if num_heads is None else num_heads
        check_divides("rg_lru", "num_heads", self.num_heads, inner, "expand * dim")
        check_choice("rg_lru", "decay_init", decay_init, ("code", "paper"))
        self.scale_first, self.chunk_size = scale_first, chunk_size
        self.in_proj = nn.Linear(dim, inner)
        self.gate_proj = nn.Linear(dim, inner)
        self.out_proj = nn.Linear(inner, dim)
        for proj in (self.in_proj, self.gate_proj, self.out_proj):
            nn.init.normal_(proj.weight, std=proj.in_features**-0.5)
            nn.init.zeros_(proj.bias)
        self.conv = ShortConv(inner, conv_size) if conv_size else None
        self.conv_bias = nn.Parameter(torch.zeros(inner)) if conv_size else None
        self.conv_tail = max(conv_size - 1, 0)
        if self.conv is not None:
            nn.init.normal_(self.conv.weight, std=0.1 * conv_size**-0.5)
        self.input_gate = BlockLinear(inner, self.num_heads)
        self.recurrence_gate = BlockLinear(inner, self.num_heads)
        if decay_init == "code":
            rate = -0.5 * torch.empty(inner).uniform_(FASTEST**2, SLOWEST**2).log()
        else:
            rate = -torch.empty(inner).uniform_(FASTEST, SLOWEST).log() / POWER
        self.decay = nn.Parameter(rate.expm1().log())  # Lambda: softplus of it is the rate

    def init_state(self, batch: int, capacity: int | None = None) -> RGLRUState:
        return RGLRUState(
            self.zeros(batch, self.inner),
            self.zeros(batch, self.conv_tail, self.inner),
            self.zeros(batch, dtype=torch.long),
        )

    def mix(
        self, x: Tensor, state: RGLRUState, *, pack: Pack, mode: str, shared: Shared
    ) -> tuple[Tensor, RGLRUState]:
        u, conv = self.in_proj(x), state.conv
        if self.conv is not None:
            u, conv = self.conv(u, conv, pack, mode)
            u = u + self.conv_bias
        dtype = state_dtype(u.dtype)
        rate = POWER * F.softplus(self.decay.to(dtype))
        log_decay = -rate * torch.sigmoid(self.recurrence_gate(u).to(dtype))
        # where a_t rounds to 1 the root has no finite derivative, and nothing is let in
        input_weight = (-torch.expm1(2 * log_decay)).clamp_min(torch.finfo(dtype).tiny).sqrt()
        first, length = self._first(x, state.length, pack)
        if not self.scale_first:
            input_weight = torch.where(first[..., None], 1, input_weight)
        gated = torch.sigmoid(self.input_gate(u).to(dtype)) * u.to(dtype)
        h, final = linear_scan(
            log_decay,
            input_weight * gated,
            initial_state=state.h,
            cu_seqlens=pack.cu_seqlens,
            max_seqlen=pack.max_seqlen,
            mode=mode,
            chunk_size=self.chunk_size,
        )
        y = h.to(x.dtype) * F.gelu(self.gate_proj(x), approximate="tanh")
        return self.out_proj(y), RGLRUState(final, conv, length)

    def _first(self, x: Tensor, length: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        """Which tokens [B, T] are the first of their sequence, and how many each row has seen after the call."""
        if pack.cu_seqlens is None:
            place = torch.arange(x.shape[1], device=x.device)
            return length[:, None] + place == 0, length + x.shape[1]
        tokens = locate(pack.cu_seqlens, x.shape[1])
        place = tokens.offset if not length.shape[0] else tokens.offset + length[tokens.sequence]
        return (place == 0)[None], length + pack.cu_seqlens.diff()
