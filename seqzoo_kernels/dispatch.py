"""Which backend runs: *auto* falls back, an explicit choice works or raises saying why not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

NAMES = ("auto", "reference", "torch", "triton", "sdpa", "xformers")
_default = {"backend": "auto"}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every op called with ``backend="auto"`` inside the block: for tests and bisecting.

    An op that lacks the backend raises. The choice is global to the process, not to the thread.
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
    backends: Mapping[str, ModuleType],
    refusals: Mapping[str, str | None] | None = None,
) -> str:
    """The name of the backend to run: `backend`, else the default of `use_backend`, else the first that does not refuse.

    `refusals` says why a backend can't serve this call; None is no objection.
    """
    check_name(op, backend)
    refusals = refusals or {}
    name = _default["backend"] if backend == "auto" else backend
    if name == "auto":
        return next(name for name in backends if refusals.get(name) is None)
    reason = refusals.get(name) if name in backends else "it has no such backend"
    if reason is not None:
        others = ", ".join(other for other in backends if other != name)
        raise ValueError(f"{op}: backend {name!r} can't be used: {reason}. Others: {others}.")
    return name
