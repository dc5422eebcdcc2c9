"""Test any kernel on the laws of its op: `check_op("linear_scan", my_backend)`. Needs hypothesis."""

import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from seqzoo.errors import closest

from .law import OP_LAWS, LawViolation, arguments
from .op_cases import VARIANTS
from .report import Report, Row
from .search import BUDGETS, Search, check_names, first_failure_raised, need_hypothesis
from .subject import importable

MODES = ("parallel", "chunked", "recurrent")


def check_op(
    op: str,
    backend: Any,
    *,
    laws: Collection[str] | None = None,
    modes: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] | None = None,
    budget: str = "quick",
    seed: int = 0,
) -> Report:
    """Test a kernel on the laws of its op; the first that it breaks is raised.

    Args:
        op: the name of an op of seqzoo_kernels.
        backend: the name of one of its backends, or a module or object with `forward` and `backward` of the same signature.
        laws: the names in `OP_LAWS` to test; by default all.
        modes: by default those of the op.
        dtypes: instead of those that each law is about.
        devices: by default the CPU.
        budget: "quick", or "thorough", which draws twenty times as many examples.
        seed: of inputs and examples.

    Raises:
        LawViolation: which law is broken, the smallest example found, by how much, and two lines that show it again.
        ValueError, TypeError, ImportError: there is no such op, backend, law or budget; hypothesis is missing.
    """
    check_names(laws, OP_LAWS, budget)
    need_hypothesis()
    from .op_examples import op_examples

    tested = kernel(op, backend)
    if modes is None:
        modes = ("auto",) if backend in ("reference", "sdpa") else MODES
    places = [{"device": device} if device != "cpu" else {} for device in devices or ["cpu"]]

    def row(law: str) -> Row:
        search, examples = Search(law, seed, BUDGETS[budget]), op_examples(op)[law]
        for place, (shift, dtype), mode in product(places, enumerate(dtypes or examples.dtypes), modes):
            check = partial(tested.test, law, {"dtype": dtype, "mode": mode, **place})
            found = search.run(check, examples.always, examples.drawn, shift)
            if found is not None:
                return search.row(found)
        return search.row(None)

    rows = (row(law) for law in OP_LAWS if laws is None or law in laws)
    return Report(f"{op}, backend {tested.name}", first_failure_raised(rows))


@dataclass(frozen=True)
class Kernel:
    """A backend of an op to test; after the statement `imports` the expression `code` is it."""

    op: str
    backend: Any
    name: str
    code: str
    imports: str

    def test(self, law: str, fixed: Mapping[str, Any], example: Mapping[str, Any]) -> None:
        """Test `law` on the two as one example. A violation has its script: two lines."""
        try:
            OP_LAWS[law](self.op, self.backend, **fixed, **example)
        except LawViolation as violation:
            call = f"{self.op!r}, {self.code}, {arguments(violation.example)}"
            violation.script = f'{self.imports}\nOP_LAWS["{law}"]({call})'
            raise


def kernel(op: str, backend: Any) -> Kernel:
    """What `backend` stands for: a registered name, or a module or object with `forward` and `backward`.

    Raises:
        ValueError, TypeError: there is no such op or backend.
    """
    if op not in VARIANTS:
        raise ValueError(f"no op is called {op!r}{closest(op, VARIANTS)} Known: {', '.join(VARIANTS)}.")
    known = importlib.import_module(f"seqzoo_kernels.{op}").BACKENDS
    imports, name = "import torch; from seqzoo.testing import OP_LAWS", getattr(backend, "__name__", "yours")
    if isinstance(backend, str):
        if backend not in known:
            raise ValueError(
                f"{op} has no backend {backend!r}{closest(backend, known)} It has {', '.join(known)}."
            )
        return Kernel(op, backend, backend, repr(backend), imports)
    if not all(callable(getattr(backend, part, None)) for part in ("forward", "backward")):
        raise TypeError(f"expected backend to be a name, or to have forward and backward, got {backend!r}.")
    if isinstance(backend, ModuleType) and sys.modules.get(name) is backend:
        return Kernel(op, backend, name, name, f"{imports}; import {name}")
    if importable(backend):
        return Kernel(op, backend, name, name, f"{imports}; from {backend.__module__} import {name}")
    return Kernel(op, backend, name, "backend", f"{imports}  # backend: yours")
