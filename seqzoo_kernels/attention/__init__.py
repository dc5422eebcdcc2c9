"""Softmax attention with an optional decay of each key with the gates after it: attention, sliding windows, ALiBi, FoX."""

from typing import Any

import torch
from torch import Tensor

from .. import checks, dispatch
from ..packs import locate, longest_sequence, repack, unpack
from ..register import TorchOp, traced
from . import eager, reference, sdpa, xformers
from .cache import (
    FULL,
    AttentionState,
    DecayAttentionState,
    State,
    append_,
    check_room,
    extend,
    has_room,
    reserve,
    slot_positions,
    tokens_held,
)

BACKENDS = {
    "sdpa": sdpa,
    "triton": dispatch.Later(f"{__name__}.triton"),
    "torch": eager,
    "reference": reference,
    "xformers": xformers,  # by name alone: "auto" ends with the reference, which serves all
}
fused = dispatch.Later(f"{__name__}.appending")
DEFAULT_CHUNK_SIZE = 128
WIDEST_HEAD = 256  # of the Triton kernels
__all__ = ["AttentionState", "DecayAttentionState", "State", "attention", "reserve"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mode: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    prune: float | None = None,
    donate: bool = False,
    copy: bool = True,
) -> tuple[Tensor, State]:
    """Causal softmax attention, its cache the state; with `log_decay` forgetting attention.

        o_i = sum_{j <= i} softmax_j(scale * q_i . k_j + log_decay_{j+1} + ... + log_decay_i) v_j

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K] with H a multiple of G: query head h reads key head h // (H // G).
        v: [B, T, G, V].
        log_decay: [B, T, H], in [-inf, 0]; the gate of a key itself has no part in its weight.
        scale: of the scores; K ** -0.5 by default.
        window: a query sees at most this many keys, itself among them; no limit by default.
        initial_state: the cache so far, an AttentionState (DecayAttentionState with `log_decay`); rows may hold different
            numbers of tokens. Empty by default.
        cu_seqlens: a pack: B = 1 and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; states have batch N;
            tokens outside every sequence give 0.
        max_seqlen: a bound on the longest sequence of the pack, known to the host: rows of that size are made.
        mode: "parallel" (all queries at once: memory T^2), "chunked" (blocks of queries), "recurrent" (query by query), or
            "auto". All have the same gradient.
        backend: "sdpa" (torch's own, where it computes the same), "triton" (on a GPU, not in float64, its blocks its own),
            "torch", "reference" (plain, whatever the mode), or "auto": the first of them that serves the call, a step on a
            GPU by "triton" first. "xformers" (a pass on a GPU without decay or cache) runs by name alone. With scores of
            size s >> 1, the gradients of "sdpa", "triton" and "xformers" err by about s eps of the terms they sum, those of
            "torch" by much less.
        chunk_size: queries a block in the chunked mode.
        prune: None by default: nothing is left out. Else "triton" may leave out keys that the decay has made so light that a
            query's together weigh less than `prune`, of a total of 1, whatever their scores: the earliest ones, as long as

                sum_j e^{U_i + log_decay_{j+1} + ... + log_decay_i - s_i} < prune,   U_i = |scale| |q_i| max|k_j|

            as no score is above U_i; s_i is the score of the query's own key, in the backward pass the logarithm of the sum of
            all its weights. Blocks of such keys cost nothing. The other backends compute every key, which is as right.
        donate: T = 1 without a pack: write the token into `initial_state`, which is consumed, at no copy of the cache.
        copy: False: a new cache may be `k` and `v` themselves, uncopied, for a caller who will not write to them.

    Returns:
        (o, state): [B, T, H, V] in v's dtype, and the cache with T more slots (at most `window`). A query that sees no key
        gives 0. The cache keeps its dtype; a new one has k's.

    Raises:
        ValueError: a shape, mode or backend is not as above, or a cache given to `donate` is full.
        TypeError: a dtype, or the kind of state, is not as above.

    Source: forgetting attention, Lin et al. 2025, arXiv:2503.02130.
    """
    check(q, k, v, log_decay, window, initial_state, cu_seqlens)
    checks.check_mode("attention", mode)
    checks.check_count("attention", "chunk_size", chunk_size)
    if prune is not None and not 0 < prune < 1:
        raise ValueError(f"attention: expected prune to lie between 0 and 1, got {prune}.")
    q, k, v = checks.autocast(q, k, v)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    length = q.shape[1]
    if donate:
        return _decode(q, k, v, log_decay, scale, window or 0, initial_state, cu_seqlens, backend)
    packed = q, k, v
    tokens = None
    added = None  # tokens of each row, where they are not T
    if cu_seqlens is not None:
        tokens = locate(cu_seqlens, length)
        longest = longest_sequence(cu_seqlens, max_seqlen, length)
        q, k, v = (unpack(x, cu_seqlens, longest) for x in (q, k, v))
        log_decay = None if log_decay is None else unpack(log_decay, cu_seqlens, longest)
        added = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    state = empty_state(q, k, v, log_decay) if initial_state is None else initial_state
    slots = state.k.shape[1]
    keys, values, bias = k, v, None
    if slots:
        keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        if isinstance(state, DecayAttentionState):
            bias = torch.cat([state.bias, state.bias.new_zeros(k.shape[0], k.shape[1], q.shape[2])], 1)
    # a traced graph serves any T, so it can't depend on whether this one is longer than the window
    narrow = window and (torch.compiler.is_compiling() or window < q.shape[1])
    whole = cu_seqlens is None and not slots and not narrow
    learning = _learns(q, keys, values, log_decay, bias)
    name = _pick(backend, q, v, log_decay, window, mode, slots > 0, whole, learning)
    if name == "xformers":
        out = xformers.forward(*packed, scale, window or 0, cu_seqlens)
    elif name == "sdpa" and whole:
        out = sdpa.attend(q, k, v, scale, causal=True)
    else:
        new = torch.arange(q.shape[1], device=q.device)
        position = state.length[:, None] + new
        if added is not None:
            position = torch.where(new < added[:, None], position, -1)
        key_position = position
        if slots:
            key_position = torch.cat([slot_positions(state.length, slots, window or 0), position], 1)
        block = {
            "auto": 0,
            "parallel": max(q.shape[1], 1),
            "chunked": chunk_size or DEFAULT_CHUNK_SIZE,
            "recurrent": 1,
        }[mode]
        args = (q, keys, values, log_decay, bias, position, key_position, scale, window or 0)
        out = _run(name, args, block, prune or 0.0)
        out = out if tokens is None else repack(out, tokens)
    return out, extend(state, k, v, added, log_decay, window or 0, copy)


def _learns(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _pick(backend, q, v, log_decay, window, mode, cached, whole, learning) -> str:  # type: ignore[no-untyped-def]
    refusals = {
        "sdpa": sdpa.refusal(q, log_decay, mode, whole, learning),
        "triton": _no_triton(q, v, window, mode, learning),
        "xformers": xformers.refusal(q, log_decay, window, mode, cached, learning),
    }
    backends: dict[str, Any] = BACKENDS
    if q.shape[1] == 1 and refusals["triton"] is None:
        # its kernel for a step shares the cache out among programs, and wants no mask of it: before sdpa
        backends = {"triton": BACKENDS["triton"], **BACKENDS}
    return dispatch.pick("attention", backend, backends, refusals)


def _no_triton(q: Tensor, v: Tensor, window: int | None, mode: str, learning: bool) -> str | None:
    """Why the Triton kernels can't serve a call, or None."""
    if learning and (q.shape[1] == 1 or window == 1):
        return sdpa.ONE_KEY
    if mode == "recurrent" and q.shape[1] != 1:
        return "it has no mode 'recurrent': it takes blocks of queries"
    if q.dtype == torch.float64:
        return "its accumulators are float32, and q is float64"
    if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD:
        return f"its heads have a size of at most {WIDEST_HEAD}, got {q.shape[-1]} and {v.shape[-1]}"
    return dispatch.no_triton(q, "q")


def _run(name: str, args: Any, block: int, prune: float) -> Tensor:
    if name == "sdpa":
        return sdpa.forward(*args)
    return reference.forward(*args)[0] if name == "reference" else _op(*args, block, prune, name)[0]


def _decode(q, k, v, log_decay, scale, window, state, cu_seqlens, backend):  # type: ignore[no-untyped-def]
    if q.shape[1] != 1 or cu_seqlens is not None or state is None:
        raise ValueError("attention: donate=True takes one token (T = 1), a state and no pack.")
    held = tokens_held(state.length)
    slots = state.k.shape[1]
    fewest = most = slots
    if held is not None:  # the slots behind hold nothing
        check_room(state, window, held)
        fewest, most = (min(count + 1, slots) for count in held)
    bias = state.bias if isinstance(state, DecayAttentionState) else None
    learning = _learns(q, k, v, log_decay, state.k, state.v, bias)
    name = _pick(backend, q, v, None, window, "auto", True, False, learning)
    if name == "triton" and not (torch.compiler.is_compiling() or traced()) and fused.serves(state):
        position, cached, room = fused.append_(state, k, v, log_decay, window, most)
        if held is None:
            torch._assert_async(room, FULL)
    else:
        if held is None:
            torch._assert_async(has_room(state, window), FULL)
        position = state.length.clone()[:, None]
        append_(state, k, v, log_decay, window)
        cached = slot_positions(state.length, most, window)
    keys, values = state.k[:, :most].to(q.dtype), state.v[:, :most].to(v.dtype)
    if name == "sdpa" and held is not None and fewest == most and bias is None:
        return sdpa.attend(q, keys, values, scale), state  # each key is seen
    args = (q, keys, values, None, None if bias is None else bias[:, :most], position, cached, scale, window)
    return _run(name, args, 1, 0.0), state


def empty_state(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> State:
    batch = k.shape[0]
    length = torch.zeros(batch, dtype=torch.long, device=k.device)
    state = AttentionState(k.new_zeros(batch, 0, *k.shape[2:]), v.new_zeros(batch, 0, *v.shape[2:]), length)
    if log_decay is None:
        return state
    dtype = checks.state_dtype(log_decay.dtype)
    return DecayAttentionState(*state, k.new_zeros(batch, 0, q.shape[2], dtype=dtype))


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    window: int | None,
    state: State | None,
    cu_seqlens: Tensor | None,
) -> None:
    op = "attention"
    batch, length, groups, width = checks.check_heads(op, q, k, v)
    if log_decay is not None:
        checks.check_float(op, "log_decay", log_decay)
        checks.check_shape(op, "log_decay", log_decay, (batch, length, q.shape[2]), "B, T, H")
    checks.check_count(op, "window", window)
    checks.check_cu_seqlens(op, cu_seqlens, batch)
    if state is None:
        return
    kind = AttentionState if log_decay is None else DecayAttentionState
    if not isinstance(state, kind):
        raise TypeError(
            f"{op}: expected initial_state to be of type {kind.__name__}, got {type(state).__name__}."
        )
    rows, letter = (batch, "B") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "N")
    slots = state.k.shape[1]
    checks.check_shape(op, "initial_state.k", state.k, (rows, None, groups, width), f"{letter}, S, G, K")
    checks.check_shape(
        op, "initial_state.v", state.v, (rows, slots, groups, v.shape[3]), f"{letter}, S, G, V"
    )
    checks.check_shape(op, "initial_state.length", state.length, (rows,), letter)
    if isinstance(state, DecayAttentionState):
        checks.check_shape(op, "initial_state.bias", state.bias, (rows, slots, q.shape[2]), f"{letter}, S, H")
    if window is not None and slots > window:
        raise ValueError(f"{op}: expected initial_state of at most window={window} slots, got {slots}.")


def _fake(q, k, v, log_decay, bias, query_position, key_position, scale, window, block, prune):  # type: ignore[no-untyped-def]
    batch, length, heads, _ = q.shape
    lse = q.new_empty(batch, heads, length, dtype=torch.float32)
    return v.new_empty(batch, length, heads, v.shape[3]), lse


_op = TorchOp(
    "attention",
    tensors=(
        "Tensor q",
        "Tensor k",
        "Tensor v",
        "Tensor? log_decay",
        "Tensor? bias",
        "Tensor query_position",
        "Tensor key_position",
    ),
    options=("float scale", "int window", "SymInt block", "float prune"),
    outputs=2,  # the second is for the backward pass of "triton": log2 of the sum of each query's weights
    backends=BACKENDS,
    fake=_fake,
    plain=reference.forward,
)
