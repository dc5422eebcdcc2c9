"""gated_linear_attention on a GPU: shapes and launches; the kernels are in kernels.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..hopper import SAFE_WIDTH
from ..linear_scan import triton as scan
from ..sizes import cdiv, next_power_of_2
from .chunks import Table
from .gradients import d_keys_kernel, d_states_kernel, d_values_kernel
from .kernels import outputs_kernel, recurrent_kernel, states_kernel
from .tiles import CHANNEL, CONSTANT, HEAD, NONE

Optional = Tensor | None
KINDS = {1: CONSTANT.value, 3: HEAD.value, 4: CHANNEL.value}  # of gates, by dimensions
CHUNK = 64
# Key and value channels of a tile, warps and stages of each kernel, by the bytes of an input's element.
# The fastest that were measured on an H200.
TILES = {
    2: {
        "states": (64, 128, 4, 3),
        "outputs": (64, 128, 4, 2),
        "d_states": (64, 128, 4, 3),
        "d_values": (64, 128, 4, 2),
        "d_keys": (64, 128, 4, 1),
    },
    4: {
        "states": (64, 64, 4, 2),
        "outputs": (64, 64, 4, 1),
        "d_states": (64, 64, 4, 2),
        "d_values": (64, 64, 4, 1),
        "d_keys": (64, 64, 4, 1),
    },
}
PROGRAMS = 128  # fewer leave much of a GPU idle
LEAST = 32  # chunks of a part of a row
STATE = 8192  # numbers of a state that a program of the recurrent mode holds


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
    call = Call.of(q, k, v, log_decay, cu_seqlens, chunk_size)
    state = None if initial_state is None else initial_state.float().contiguous()
    final = q.new_empty(call.rows, *call.state_shape, dtype=torch.float32)
    out = call.new(v, q.shape[:3])
    if mode == "recurrent":
        _recurrent(call, state, scale, out, final)
        return out, final
    states, sums = _states(call, state, final)
    pointers = (call.q, call.k, call.v, call.g, states, call.chunks, sums, out)
    _launch(outputs_kernel, "outputs", call, call.heads, call.V, pointers, scale=scale)
    return out, final


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
    """The states are computed again rather than kept."""
    call = Call.of(q, k, v, log_decay, cu_seqlens, chunk_size)
    state = None if initial_state is None else initial_state.float().contiguous()
    do = grad_out.contiguous()
    states, sums = _states(call, state, torch.empty_like(final))
    d_states, d_initial = torch.empty_like(states), torch.empty_like(final)

    def through(start: Optional, end: Tensor, gates: Optional) -> None:
        begin, spent = end if start is None else start, end if gates is None else gates
        pointers = (call.q, do, call.g, begin, call.chunks, call.spans, d_states, end, spent)
        options = {"scale": scale, "ENDS": gates is not None}
        _launch(d_states_kernel, "d_states", call, call.groups, None, pointers, **options)

    _through_rows(call, through, grad_final.float().contiguous(), d_initial, backwards=True)
    dv = call.new(v, v.shape[:3])
    pointers: tuple[Tensor, ...] = (call.q, call.k, call.g, do, d_states, call.chunks, sums, dv)
    _launch(d_values_kernel, "d_values", call, call.groups, call.V, pointers, scale=scale)

    dq, dk = call.new(q, q.shape[:3], call.K), call.new(k, k.shape[:3], call.K)
    dg = call.g
    if log_decay is not None:
        parts = cdiv(call.K, _tile(call, "d_keys")[0])
        shape = k.shape if log_decay.dim() == 4 else (parts, *k.shape[:3])
        dtype = log_decay.dtype if log_decay.dim() == 4 else torch.float32
        dg = (torch.empty if cu_seqlens is None else torch.zeros)(shape, dtype=dtype, device=q.device)
    pointers = (call.q, call.k, call.v, call.g, do, states, d_states, call.chunks, sums, dq, dk, dg)
    _launch(
        d_keys_kernel,
        "d_keys",
        call,
        call.groups,
        call.K,
        pointers,
        scale=scale,
        tokens=q.shape[0] * q.shape[1],
    )
    if log_decay is not None and log_decay.dim() < 4:
        dg = dg.sum(0) if log_decay.dim() == 3 else dg.sum((0, 1, 2), dtype=torch.float64)
        dg = dg.to(log_decay.dtype)
    d_gates = None if log_decay is None else dg
    return dq, dk, dv, d_gates, None if initial_state is None else d_initial.to(initial_state.dtype), None


@dataclasses.dataclass(frozen=True)
class Call:
    """The inputs of a call, dense, and what they say of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # anything without a gate
    gate: int  # none, constant, a head, a key channel
    size: int  # tokens of a chunk
    count: int  # chunks
    rows: int  # of states
    chunks: Tensor  # of a pack: first token and number of tokens of each chunk [2, count]
    spans: Tensor  # of a pack: the first chunk of each sequence and the end [N + 1]
    cu: Optional

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Optional, cu_seqlens: Optional, chunk_size: int
    ) -> "Call":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, length = q.shape[:2]
        size = min(max(16, next_power_of_2(chunk_size or CHUNK)), CHUNK)
        size = min(size, max(16, next_power_of_2(length)))
        g, gate = q, NONE.value
        if log_decay is not None:
            g, gate = log_decay.contiguous(), KINDS[log_decay.dim()]
        if cu_seqlens is None:
            return cls(q, k, v, g, gate, size, batch * cdiv(length, size), batch, q, q, None)
        pack = Table.of(cu_seqlens, length, size)
        chunks = torch.stack([pack.first, pack.tokens])
        return cls(
            q, k, v, g, gate, size, chunks.shape[1], len(cu_seqlens) - 1, chunks, pack.starts, cu_seqlens
        )

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def groups(self) -> int:
        return self.k.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups, self.K, self.V

    @functools.cached_property
    def parts(self) -> int:
        """Of each row, gone through side by side after a first pass to their ends, which pays with three of them."""
        BK, BV, _, _ = TILES[self.q.element_size()]["states"]
        programs = self.rows * self.groups * cdiv(self.K, BK) * cdiv(self.V, BV)
        if self.cu is not None or not programs:
            return 1
        parts = min(2 * PROGRAMS // programs, self.count // self.rows // LEAST)
        return parts if parts > 2 else 1

    def new(self, like: Tensor, shape: Any, width: int | None = None) -> Tensor:
        """Where a result goes: the kernels write every token but those outside the sequences of a pack."""
        make = like.new_empty if self.cu is None else like.new_zeros
        return make(*shape, self.V if width is None else width)


def _tile(call: Call, name: str) -> tuple[int, int, int, int]:
    BK, BV, warps, stages = TILES[call.q.element_size()][name]
    fit = lambda block, size: min(block, max(16, next_power_of_2(size)))  # noqa: E731
    BK, BV = fit(BK, call.K), fit(BV, call.V)
    # Few rows take narrower parts of a state, for these kernels go through all tokens one by one.
    if name in ("states", "d_states"):
        rows = (1 if call.cu is not None else call.rows * call.parts) * call.groups * cdiv(call.K, BK)
        while rows * cdiv(call.V, BV) < PROGRAMS and BV > SAFE_WIDTH:
            BV //= 2
    return BK, BV, 2 if min(BK, BV) < SAFE_WIDTH else warps, stages


def _launch(
    kernel: Any,
    name: str,
    call: Call,
    heads: int,
    split: int | None,
    pointers: tuple[Tensor, ...],
    **numbers: Any,
) -> None:
    """A program for each chunk and head and for each block of the `split` channels, or for each row, head and block of a
    state where that is None."""
    BK, BV, warps, stages = _tile(call, name)
    if split is None:
        grid = (call.rows * call.parts * heads, cdiv(call.K, BK) * cdiv(call.V, BV))
    else:
        grid = (call.count * heads, cdiv(split, BK if name == "d_keys" else BV))
    if not grid[0] * grid[1]:
        return
    half, single = call.q.dtype == torch.bfloat16, call.q.dtype == torch.float32
    levels = call.size.bit_length() - 1
    two_ways = call.gate == CHANNEL.value and not single and "LEVELS" in kernel.arg_names
    given = {
        "H": call.heads,
        "G": call.groups,
        "K": call.K,
        "V": call.V,
        "GATE": call.gate,
        "PACKED": call.cu is not None,
        "C": call.size,
        "BK": BK,
        "BV": BV,
        "OPERAND": tl.bfloat16 if half else tl.float32,
        "PRECISION": _precision() if single else "tf32",
        "EXACT": single,
        "MIXED": next_power_of_2(call.K) if two_ways else 0,
        "T": call.q.shape[1],
        "chunks": call.count,
        "parts": call.parts,
        **numbers,
    }
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    if "LEVELS" not in kernel.arg_names:
        kernel[grid](*pointers, **given, num_warps=warps, num_stages=stages)
        return
    for LEVELS in (0, levels) if two_ways else (levels,):
        kernel[grid](*pointers, **given, LEVELS=LEVELS, num_warps=warps, num_stages=stages)


def _precision() -> str:
    """Of float32 products: three TF32 products make one, unless torch is told that one will do."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _states(call: Call, state: Optional, final: Tensor) -> tuple[Tensor, Tensor]:
    """S before each chunk [chunks, G, K, V], in the inputs' dtype; of gates a key channel their sums over the first half of
    each chunk and over all of it [2, chunks, G, K]."""
    states = call.q.new_empty(call.count, *call.state_shape)
    size = call.count if call.gate == CHANNEL.value else 0
    sums = call.q.new_empty(2, size, call.groups, call.K, dtype=torch.float32)

    def through(start: Optional, end: Tensor, gates: Optional) -> None:
        begin, spent = end if start is None else start, sums if gates is None else gates
        pointers = (call.k, call.v, call.g, begin, call.chunks, call.spans, states, end, spent)
        options = {"HAS_STATE": start is not None, "ENDS": gates is not None}
        _launch(states_kernel, "states", call, call.groups, None, pointers, **options)

    _through_rows(call, through, state, final)
    return states, sums


def _through_rows(
    call: Call,
    through: Callable[[Optional, Tensor, Optional], None],
    start: Optional,
    end: Tensor,
    *,
    backwards: bool = False,
) -> None:
    """Writes `end` [B, G, K, V], what a pass over states, `through`, makes of `start`; given `gates`, it makes ends alone.

    Rows in parts: first what each part makes of 0, and its gates' sums; from these what each part starts with; then all.
    """
    if call.parts == 1:
        return through(start, end, None)
    shape = (call.rows, call.parts, *call.state_shape)
    ends, gates = end.new_empty(shape), end.new_empty(*shape[:-1])
    through(None, ends, gates)
    log_decay = gates[..., None].expand(shape).reshape(*shape[:2], -1)
    first = end.new_zeros(end.shape) if start is None else start
    states, last = scan.forward(
        log_decay, ends.flatten(2), None, first.flatten(1), None, backwards, "parallel", 0
    )
    end.copy_(last.view_as(end))
    states = states.view(shape)
    starts = [states[:, 1:], first[:, None]] if backwards else [first[:, None], states[:, :-1]]
    return through(torch.cat(starts, 1), torch.empty_like(ends), None)


def _recurrent(call: Call, state: Optional, scale: float, out: Tensor, final: Tensor) -> None:
    BK = next_power_of_2(call.K)
    BV = min(next_power_of_2(call.V), max(1, STATE // BK), 64)
    grid = (call.rows * call.groups, cdiv(call.V, BV))
    if not grid[0] * grid[1]:
        return
    recurrent_kernel[grid](
        call.q,
        call.k,
        call.v,
        call.g,
        final if state is None else state,
        call.q if call.cu is None else call.cu,
        out,
        final,
        call.q.shape[1],
        scale,
        H=call.heads,
        G=call.groups,
        K=call.K,
        V=call.V,
        GATE=call.gate,
        PACKED=call.cu is not None,
        HAS_STATE=state is not None,
        EXACT=call.q.dtype == torch.float32,
        BK=BK,
        BV=BV,
        num_warps=4,
    )
