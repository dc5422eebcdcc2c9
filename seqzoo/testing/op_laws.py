"""The laws of a kernel, each written once: `OP_LAWS[name](op, backend, **example)` raises `LawViolation` if it breaks one.

What is right is the reference in float64, judged by law 8. As the reference runs row after row, sequence after sequence and
token after token, equality with it also says that modes agree, that rows are independent and that nothing sees the future.

`op` is the name of an op of seqzoo_kernels, `backend` the name of one of its backends or an object with the same `forward` and
`backward`. Every law takes what `draw_op` takes, and `mode`, `dtype`, `device`, `chunk_size` and how things lie in memory.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqzoo_kernels import precision as law_8
from seqzoo_kernels.dispatch import Refusal

from .comparing import Measured, named_leaves, same_bits, weights
from .law import LawViolation, Untestable, op_law, require, violated
from .layouts import owns_storage, poisoned_memory, strided
from .op_cases import TIMED, WIDER, Inputs, OpCase, draw_op

GIVEN_NAME = "given"  # of a backend that is no registered one, while it is tested
CONSTANTS = ("log_decay", "phase")  # where these are [D], their gradients are sums over time


@op_law
def precision(op: str, backend: Any, **drawn: Any) -> None:
    """max|X - X64| <= 2 max|ref - X64| + 8 eps scale for values, final state and every gradient; dtypes are the op's."""
    _agrees(op, backend, OpCase.call, **drawn)


@op_law
def extremes(op: str, backend: Any, **drawn: Any) -> None:
    """Any log-decay in [-inf, 0], no token, no row, any width: law 8 holds and every gradient is finite."""
    for name, value in _agrees(op, backend, OpCase.call, **drawn).items():
        require(not value.isnan().any(), f"{name} has a NaN.")
        require(name.startswith("state") or bool(value.isfinite().all()), f"{name} is not finite.")


@op_law
def splitting(op: str, backend: Any, *, cuts: Sequence[int], **drawn: Any) -> None:
    """Part after part, each from the state of the one before, is the whole; a reversed op begins with the last part."""

    def in_parts(case: OpCase, inputs: Inputs, state: Any, **how: Any) -> tuple[Tensor, Any]:
        spans = list(pairwise([0, *cuts, case.length]))
        outputs = []
        for start, end in reversed(spans) if case.reverse else spans:
            out, state = case.call(case.part(inputs, start, end), state, **how)
            outputs.append(out)
        return torch.cat(outputs[::-1] if case.reverse else outputs, 1), state

    _agrees(op, backend, in_parts, **drawn)


@op_law
def packing(op: str, backend: Any, *, lengths: Sequence[int], **drawn: Any) -> None:
    """`cu_seqlens` gives what the sequences give one by one, states included; behind the last one all is 0, gradients too."""
    result = _agrees(op, backend, OpCase.call, lengths=tuple(lengths), **drawn)
    for name, value in result.items():
        if name in ("out", *(f"gradient of {given}" for given in TIMED)) and value.dim() >= 3:
            require(not value[:, sum(lengths) :].any(), f"{name} behind the last sequence is not 0.")


@op_law
def state_value(op: str, backend: Any, **drawn: Any) -> None:
    """A call changes nothing it is given and gives the same bits twice; its states own contiguous storage."""
    how, where = _split(drawn)
    case = draw_op(op, **drawn)
    inputs = case.cast(where["dtype"], where["device"])
    before = {name: (x.clone(), x._version) for name, x in inputs.items()}
    with _offered(op, backend) as name, _refusals(), poisoned_memory(where["poisoned"]):
        runs = [case.call(inputs, case.initial_state(inputs), backend=name, **how) for _ in range(2)]
    for name, (old, version) in before.items():
        require(torch.equal(inputs[name], old), f"{name}: the call changed it.")
        require(inputs[name]._version == version, f"{name}: the call wrote into it.")
    first, second = ({"out": out, **named_leaves(state)} for out, state in runs)
    same_bits(second, first, "the same call twice")
    owns_storage(named_leaves(runs[0][1]), {**inputs, "out": first["out"]})


def _agrees(op: str, backend: Any, run: Callable[..., tuple[Tensor, Any]], **drawn: Any) -> Measured:
    """What `run` gives with `backend`, once it meets law 8."""
    how, where = _split(drawn)
    expected = _expected(
        op, where["dtype"], where["device"], where["gradients"], tuple(sorted(drawn.items()))
    )
    case, inputs = expected.case, expected.inputs
    laid_out = strided if where["layout"] == "strided" else torch.clone
    inputs = {name: laid_out(x) for name, x in inputs.items()}
    with _offered(op, backend) as name, _refusals(), poisoned_memory(where["poisoned"]):
        result = _measured(
            lambda leaves: run(case, leaves, case.initial_state(leaves), backend=name, **how),
            inputs,
            where["gradients"],
        )
    for name, dtype in case.dtypes(where["dtype"]).items():
        require(result[name].dtype == dtype, f"{name}: expected {dtype}, got {result[name].dtype}.")
    _judge(expected, result, where["dtype"])
    return result


class _Expected(NamedTuple):
    case: OpCase
    inputs: Inputs
    exact: Measured
    reference: Measured
    terms: Tensor | None  # of the gradients of constants, written out in time


@lru_cache(maxsize=64)  # each mode of each backend is compared with the same
def _expected(
    op: str, dtype: torch.dtype, device: str, gradients: str, drawn: tuple[tuple[str, Any], ...]
) -> _Expected:
    case = draw_op(op, **dict(drawn))
    inputs = case.cast(dtype, device)

    def plain(leaves: Inputs) -> tuple[Tensor, Any]:
        return case.call(leaves, case.initial_state(leaves), backend="reference")

    wide = {n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in inputs.items()}
    exact = _measured(plain, wide, gradients)
    terms = None
    constants = [name for name in CONSTANTS if name in inputs and inputs[name].dim() == 1]
    if constants and "x" in inputs:
        shape = inputs["x"].shape
        written_out = {n: x.expand(shape).clone() if n in constants else x for n, x in wide.items()}
        found = _measured(plain, written_out, gradients)
        terms = torch.zeros(shape, dtype=torch.float64)
        for name in CONSTANTS:
            if name in inputs:
                terms = torch.hypot(terms, found[f"gradient of {name}"].cpu())
    return _Expected(
        case, inputs, exact, exact if dtype == torch.float64 else _measured(plain, inputs, gradients), terms
    )


def _judge(expected: _Expected, result: Measured, dtype: torch.dtype) -> None:
    """Law 8, tensor by tensor; whole numbers are equal. A rotated state is in float32 whatever the dtype of x."""
    _, inputs, exact, reference, terms = expected
    if "phase" in inputs:
        dtype = WIDER.get(dtype, dtype)
    for name, wanted in exact.items():
        got, scale = result[name], None
        if not wanted.is_floating_point() and not wanted.is_complex():
            require(torch.equal(got, wanted), f"{name}: expected {wanted.tolist()}, got {got.tolist()}.")
            continue
        if name == "gradient of log_decay" and "q" in inputs:
            scale = law_8.log_decay_scale(wanted, inputs["q"], exact["gradient of q"])
        elif terms is not None and name.removeprefix("gradient of ") in CONSTANTS and wanted.dim() == 1:
            scale = law_8.sum_scale(wanted, terms)
        try:
            law_8.check_close(got, wanted, reference[name], dtype=dtype, name=name, scale=scale)
        except LawViolation:
            raise
        except AssertionError as error:
            if got.shape != wanted.shape:
                violated(str(error))
            allowed = law_8.allowed_error(wanted, reference[name], dtype, scale=scale)
            off = (got.to(wanted.dtype) - wanted).abs().nan_to_num(torch.inf).max().item()
            violated(str(error), measured=off, allowed=allowed)


def _measured(run: Callable[[Inputs], tuple[Tensor, Any]], inputs: Inputs, gradients: str) -> Measured:
    """Output, final state and the gradients of a weighted sum of the two; the weights are as `gradients` says."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, state = run(leaves)
    values = {"out": out, **named_leaves(state)}
    roots = {name: v for name, v in values.items() if v.requires_grad}
    given = [_cotangent(v, gradients) for v in roots.values()]
    found: Sequence[Tensor] = [torch.zeros_like(x) for x in inputs.values()]
    if roots:
        found = torch.autograd.grad(
            list(roots.values()), list(leaves.values()), given, materialize_grads=True
        )
    slopes = {f"gradient of {name}": g for name, g in zip(leaves, found, strict=True)}
    return {name: v.detach() for name, v in values.items()} | slopes


def _cotangent(value: Tensor, gradients: str) -> Tensor:
    """What comes back to an output; nothing comes back to a bias of -inf."""
    if gradients == "expanded":
        return torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
    given = weights(torch.view_as_real(value.detach()) if value.is_complex() else value)
    given = torch.view_as_complex(given).to(value.dtype) if value.is_complex() else given.to(value.dtype)
    given = given.masked_fill(value.detach().isinf(), 0)
    return strided(given) if gradients == "strided" else given


def _split(drawn: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take out of `drawn` what the call is given, and where its tensors lie."""
    how = {"mode": drawn.pop("mode", "auto"), "chunk_size": drawn.pop("chunk_size", None)}
    where = {
        "dtype": torch.float64,
        "device": "cpu",
        "layout": "dense",
        "gradients": "dense",
        "poisoned": False,
    }
    return how, {name: drawn.pop(name, default) for name, default in where.items()}


@contextmanager
def _offered(op: str, backend: Any) -> Iterator[str]:
    """The name by which the op takes the backend; one that is not registered has a name inside the block only."""
    if isinstance(backend, str):
        yield backend
        return
    backends = importlib.import_module(f"seqzoo_kernels.{op}").BACKENDS
    backends[GIVEN_NAME] = backend
    try:
        yield GIVEN_NAME
    finally:
        del backends[GIVEN_NAME]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        raise Untestable(refusal.reason) from refusal
