"""Errors that say what was expected, which argument, what came."""

from collections.abc import Sequence

import torch
from torch import Tensor

MODES = ("auto", "parallel", "chunked", "recurrent")


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int | None], letters: str) -> None:
    """`letters` names the axes, such as "B, T, D"; None in `expected` admits any size."""
    shape = tensor.shape
    if len(shape) == len(expected):
        for size, wanted in zip(shape, expected, strict=True):
            if wanted is not None and size != wanted:
                break
        else:
            return
    sizes = [f"{a.strip()}={e}" for a, e in zip(letters.split(","), expected, strict=True) if e is not None]
    with_sizes = f" with {', '.join(sizes)}" if sizes else ""
    raise ValueError(f"{op}: expected {name} of shape ({letters}){with_sizes}, got {tuple(shape)}.")


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: expected {name} to be a tensor, got {type(value).__name__}.")


def check_float(op: str, name: str, tensor: object, *, complex_allowed: bool = False) -> None:
    check_tensor(op, name, tensor)
    assert isinstance(tensor, Tensor)
    if tensor.is_floating_point() or (complex_allowed and tensor.is_complex()):
        return
    kind = "a floating or complex tensor" if complex_allowed else "a real floating tensor"
    raise TypeError(f"{op}: expected {name} to be {kind}, got {tensor.dtype}.")


def check_wide(op: str, name: str, tensor: object, *, like: Tensor | None = None) -> None:
    """Of an op that computes in the dtype of its inputs: float32 or float64, and that of `like`."""
    check_float(op, name, tensor)
    assert isinstance(tensor, Tensor)
    wanted = "float32 or float64" if like is None else like.dtype
    if tensor.dtype != (state_dtype(tensor.dtype) if like is None else like.dtype):
        raise TypeError(f"{op}: expected {name} of {wanted}, got {tensor.dtype}.")


def check_mode(op: str, mode: str, modes: Sequence[str] = MODES) -> None:
    if mode not in modes:
        raise ValueError(f"{op}: expected mode to be one of {', '.join(modes)}, got {mode!r}.")


def check_count(op: str, name: str, value: int | None) -> None:
    """An optional int of at least 1: chunk_size, window."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: expected {name} to be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{op}: expected {name} to be at least 1, got {value}.")


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, batch: int) -> None:
    """`cu_seqlens` must be integers [N + 1] over one packed row. Its values are not read: that would wait for the device."""
    if cu_seqlens is None:
        return
    check_tensor(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: expected cu_seqlens to be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: expected cu_seqlens of shape (N + 1), got {tuple(cu_seqlens.shape)}.")
    if batch != 1:
        raise ValueError(f"{op}: a packed batch has B = 1 (cu_seqlens was given), got B = {batch}.")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype of states and accumulators for inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """q [B, T, H, K], k [B, T, G, K], v [B, T, G, V] with H a multiple of G; returns (B, T, G, K)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_float(op, name, tensor)
        if tensor.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise TypeError(f"{op}: expected {name} of q's dtype {q.dtype}, got {tensor.dtype}.")
    check_shape(op, "q", q, (None, None, None, None), "B, T, H, K")
    batch, length, heads, width = q.shape
    check_shape(op, "k", k, (batch, length, None, width), "B, T, G, K")
    groups = k.shape[2]
    check_shape(op, "v", v, (batch, length, groups, None), "B, T, G, V")
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{op}: expected the heads of q to be a multiple of the heads of k, got {heads} and {groups}."
        )
    return batch, length, groups, width


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, products are formed in its dtype (float64 stays); log-decays and states are not passed through here."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
