"""attention through memory_efficient_attention of xformers: whole causal passes, packs and windows, without decay or cache.

Its masks are objects that its kernels know; on a CPU they can be written out, and the tests compare them with ours.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import Refusal
from . import sdpa

_installed = importlib.util.find_spec("xformers") is not None


def refusal(
    q: Tensor, log_decay: Tensor | None, window: int | None, mode: str, cached: bool, learning: bool
) -> str | None:
    """Why it can't serve a call, or None. `cached`: some of its keys are those of a cache."""
    if not _installed:
        return "xformers is not installed"
    if mode != "auto":
        return f"it has no mode {mode!r}, only 'auto'"
    if log_decay is not None or cached:
        return "it serves passes without a decay and without a cache"
    if q.dtype == torch.float64:
        return "it has no float64"
    if learning and (q.shape[1] == 1 or window == 1):
        return sdpa.ONE_KEY
    if torch.compiler.is_compiling():
        return "torch.compile can't trace its choice of a kernel"
    return None if q.is_cuda else f"it needs a GPU, and q is on {q.device}"


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, cu_seqlens: Tensor | None) -> Tensor:
    """Packed as they come. Its masks want the lengths of a pack on the host, which waits for the device."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        if not window:
            return _attend(q, k, v, scale, operators().fmha.attn_bias.LowerTriangularMask())
        # rows as a pack: of a window in a row itself not all of its kernels have a backward pass
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        out = _attend(q, k, v, scale, mask([length] * batch, window, q.device))
        return out[0].unflatten(0, (batch, length))
    edges = cu_seqlens.tolist()
    start, end = edges[0], edges[-1]
    lengths = [after - before for before, after in zip(edges[:-1], edges[1:], strict=True) if after > before]
    q, k, v = (x[:, start:end] for x in (q, k, v))
    out = _attend(q, k, v, scale, mask(lengths, window, q.device))
    return F.pad(out, (0, 0, 0, 0, start, length - end))


def mask(lengths: Sequence[int], window: int, device: torch.device) -> Any:
    """Causal within sequences of these lengths, each query with at most `window` keys (0: no limit)."""
    packed = operators().fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(lengths, device=device)
    return packed.make_local_attention(window) if window else packed


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Any) -> Tensor:
    repeats = q.shape[2] // k.shape[2]
    if repeats > 1:  # of grouped heads its kernels have no backward pass
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    if not q.numel():  # its kernels want a token
        return sdpa.attend(q, k, v, scale, causal=True)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    try:
        return operators().memory_efficient_attention(q, k, v, bias, scale=scale)
    except NotImplementedError as error:
        raise Refusal("attention", "xformers", str(error), "sdpa, triton, torch, reference") from error


@functools.cache
def operators() -> Any:
    """xformers.ops. Its wheels are built for CUDA 12, whose runtime a torch for a later CUDA has not loaded: without it none
    of its kernels is there. The package nvidia-cuda-runtime-cu12 has it."""
    if torch.version.cuda and not torch.version.cuda.startswith("12."):
        for file in _files("nvidia-cuda-runtime-cu12"):
            if file.name == "libcudart.so.12":
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
    import xformers.ops

    return xformers.ops


def _files(package: str) -> Sequence[Any]:
    try:
        return importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
