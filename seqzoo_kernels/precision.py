"""Law 8, precision: how far a result may lie from the float64 result. Tolerances live here and nowhere else.

For each tensor X of a call (its value, its final state, each gradient), with X64 the same tensor computed in float64 from the
same inputs and ref the plain reference in the dtype of X:

    max|X - X64| <= 2 max|ref - X64| + 8 eps scale,     scale = max|X64|

eps belongs to the dtype whose products are formed: a bfloat16 kernel is judged as bfloat16, its float32 states
too. Below the smallest normal number of the dtype nothing has a relative precision: that much is always allowed.

Some gradients are sums whose terms cancel. Rounding is a share of the terms, however small the sum, and so is the scale:

- the gradient of a log-decay is a difference of terms as large as q * dq (`log_decay_scale`);
- the gradient of a decay or phase that is constant in time is the sum of what each token gives (`sum_scale`).

In float64, X64 is itself one rounded result among equals: there two forms of one computation agree to 1e-9 of the scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT64_RELATIVE_ERROR = 1e-9
EPS_FACTOR = 8.0
REFERENCE_FACTOR = 2.0
BENCH_ERROR = 1e-3


def largest(x: Tensor) -> float:
    """max|x| over the finite elements, 0 if there are none."""
    x = to_float64(x.cpu())
    magnitude = x.abs()[torch.isfinite(x)]
    return magnitude.max().item() if magnitude.numel() else 0.0


def log_decay_scale(exact_gradient: Tensor, exact_q: Tensor, exact_dq: Tensor) -> float:
    """The scale of a log-decay's gradient, which is a difference of terms as large as q * dq."""
    return max(largest(exact_gradient), largest(to_float64(exact_q.cpu()) * to_float64(exact_dq.cpu())))


def sum_scale(exact_gradient: Tensor, exact_terms: Tensor) -> float:
    """The scale of the gradient [D] of a constant, the sum over B and T of terms [B, T, D]: the largest sum of |terms|."""
    return max(largest(exact_gradient), largest(to_float64(exact_terms.cpu()).abs().sum((0, 1))))


def allowed_error(
    exact: Tensor, reference: Tensor | None, dtype: torch.dtype, *, scale: float | None = None
) -> float:
    """The largest error that law 8 allows.

    exact is the float64 result X64; reference the plain reference's result in the dtype of the tensor under test (not used, and
    may be None, in float64); dtype the one whose products are formed; scale replaces max|X64|.
    """
    if scale is None:
        scale = largest(exact)
    if dtype in (torch.float64, torch.complex128):
        return FLOAT64_RELATIVE_ERROR * scale
    if reference is None:
        raise ValueError(f"allowed_error: expected a reference result to judge {dtype} by, got None.")
    _, reference_error, broken = _worst(reference, exact, "reference")
    if broken:
        raise AssertionError(
            f"reference: {broken} elements are NaN or infinite where the float64 result is not."
        )
    limits = torch.finfo(dtype)
    return REFERENCE_FACTOR * reference_error + EPS_FACTOR * limits.eps * scale + limits.tiny


def check_close(
    result: Tensor,
    exact: Tensor,
    reference: Tensor | None,
    *,
    dtype: torch.dtype,
    name: str,
    scale: float | None = None,
) -> None:
    """Raise an AssertionError, naming the tensor and its worst element, unless the result meets law 8."""
    where, error, broken = _worst(result, exact, name)
    allowed = allowed_error(exact, reference, dtype, scale=scale)
    if error <= allowed:
        return
    got, wanted = to_float64(result)[where].item(), to_float64(exact)[where].item()
    what = (
        f"{broken} elements are NaN or infinite where they should not be, or the reverse"
        if broken
        else "law 8 is not met"
    )
    raise AssertionError(
        f"{name}: {what}: error {error:.3g}, allowed {allowed:.3g} ({dtype}), "
        f"worst at {where} of {tuple(exact.shape)}: got {got:.9g}, expected {wanted:.9g}."
    )


def to_float64(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest entry; NaN where a result is NaN."""
    difference = (to_float64(result) - to_float64(exact)).abs().max()
    return float(difference / to_float64(exact).abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def worth_timing(error: float, inputs: Sequence[Tensor]) -> bool:
    """Whether a result with this relative error computes what it should, for a bench.

    Products of rounded gates may cost several eps of the coarsest dtype among the inputs, and tf32 products 3e-4; another
    function costs more.
    """
    eps = max(torch.finfo(t.dtype).eps for t in inputs if t.is_floating_point() or t.is_complex())
    return error < max(EPS_FACTOR * eps, BENCH_ERROR)


def _worst(result: Tensor, exact: Tensor, name: str) -> tuple[tuple[int, ...], float, int]:
    """Index and size of the largest error, and how many elements are wrongly not finite. Equal infinities are no error."""
    if result.shape != exact.shape:
        raise AssertionError(f"{name}: expected shape {tuple(exact.shape)}, got {tuple(result.shape)}.")
    if exact.numel() == 0:
        return (), 0.0, 0
    result, exact = to_float64(result.cpu()), to_float64(exact.cpu())
    if torch.isnan(exact).any():
        raise AssertionError(f"{name}: the float64 result is itself NaN.")
    error = torch.where(result == exact, 0.0, (result - exact).abs())
    error = torch.where(torch.isnan(error), torch.inf, error)
    flat = int(error.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    return where, error.flatten()[flat].item(), int(torch.isinf(error).sum())
