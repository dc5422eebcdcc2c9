"""Which backend runs: *auto* falls back, an explicit choice works or raises saying why not."""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

NAMES = ("auto", "reference", "torch", "triton", "sdpa", "xformers")
_default = {"backend": "auto"}
_triton_is_installed = importlib.util.find_spec("triton") is not None
_interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


class Refusal(ValueError):
    """The backend asked for does not serve this call: `reason`. The text also says which others there are."""

    def __init__(self, op: str, backend: str, reason: str, others: str) -> None:
        super().__init__(f"{op}: backend {backend!r} can't be used: {reason}. Others: {others}.")
        self.reason = reason


class Later:
    """A backend that is imported when it first runs: `import seqzoo` neither needs Triton nor waits for it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._loaded: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._loaded is None:
            self._loaded = importlib.import_module(self._module)
        return getattr(self._loaded, name)


def no_triton(x: Tensor, name: str = "x") -> str | None:
    """Why a Triton kernel can't be given x, the argument `name`, or None."""
    if not x.is_cuda and not _interpreted:
        return f"it needs a GPU, and {name} is on {x.device}"
    return None if _triton_is_installed else "triton is not installed"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every op called with ``backend="auto"`` inside the block: for tests and bisecting.

    The choice is global to the process, not to the thread.

    Args:
        name: "triton", "torch", "reference", or another backend of an op; "auto" for the choice of each op.

    Raises:
        ValueError: no backend is called so; or, at the call of an op, it lacks this one or can't serve the call.
    """
    check_name("use_backend", name)
    before = _default["backend"]
    _default["backend"] = name
    try:
        yield
    finally:
        _default["backend"] = before


def check_name(op: str, name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"{op}: expected backend to be one of {', '.join(NAMES)}, got {name!r}.")


def pick(
    op: str,
    backend: str,
    backends: Mapping[str, Any],
    refusals: Mapping[str, str | None] | None = None,
) -> str:
    """The name of the backend to run: `backend`, else the default of `use_backend`, else the first that does not refuse.

    `refusals` says why a backend can't serve this call; None is no objection.
    """
    if backend not in backends:
        check_name(op, backend)
    refusals = refusals or {}
    name = _default["backend"] if backend == "auto" else backend
    if name == "auto":
        return next(name for name in backends if refusals.get(name) is None)
    reason = refusals.get(name) or (None if name in backends else "it has no such backend")
    if reason is not None:
        others = ", ".join(other for other in backends if other != name)
        raise Refusal(op, name, reason, others)
    return name
