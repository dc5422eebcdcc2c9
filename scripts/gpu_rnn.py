"""lstm and gru beside torch.nn.LSTM and torch.nn.GRU on a GPU: law 8 against float64 first, then speed.

    python scripts/gpu_rnn.py [--json FILE] [--device cuda]

Of ours, "fused" is what the mode "auto" runs on half-precision inputs, cuDNN, and "loop" goes from token to token, that of lstm
in Triton and "in torch"; an lstm with peepholes has the loops alone. torch's modules round float32 products to TF32 unless told
not to, and in bfloat16 they round the state too; all are judged by law 8 and timed in turns. Prints a row a case and one
summary line; fails if ours breaks the law.
"""

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqzoo
from seqzoo.mixers.lstm import LSTM
from seqzoo_kernels import dispatch, fused_rnn, precision
from seqzoo_kernels.bench import output

CHECKS = ((3, 130, 64), (2, 64, 512))
SPEED = ((16, 1024, 512), (8, 2048, 1024), (16, 16, 512))  # the last is the shortest that is fused
DTYPES = (torch.float32, torch.bfloat16)
CASES: dict[str, tuple[str, dict[str, Any], type[nn.Module] | None]] = {
    "lstm NP": ("lstm", {"variant": "NP"}, nn.LSTM),
    "gru": ("gru", {}, nn.GRU),
    "lstm V": ("lstm", {}, None),
}
OURS = {"in": "in_proj.weight", "recurrent": "recurrent_weight"}
THEIRS = {"in": "weight_ih_l0", "recurrent": "weight_hh_l0"}
Call = Callable[[Tensor], Any]
Shape = tuple[int, int, int]


def pair(case: str, dim: int, dtype: torch.dtype, device: str) -> tuple[seqzoo.TokenMixer, nn.Module | None]:
    """Our mixer and torch's module with the same weights."""
    torch.manual_seed(dim)
    name, options, theirs = CASES[case]
    mixer = seqzoo.create_mixer(name, dim, **options).to(device, dtype)
    if theirs is None:
        return mixer, None
    module = theirs(dim, dim, batch_first=True).to(device, dtype)
    weights = dict(mixer.named_parameters())
    with torch.no_grad():
        module.get_parameter("weight_ih_l0").copy_(weights["in_proj.weight"])
        module.get_parameter("weight_hh_l0").copy_(weights["recurrent_weight"])
        module.get_parameter("bias_ih_l0").copy_(weights["in_proj.bias"])
        hidden = module.get_parameter("bias_hh_l0").zero_()
        if name == "gru":
            hidden.copy_(F.pad(weights["recurrent_bias"], (2 * dim, 0)))
    module.flatten_parameters()
    return mixer, module


def ways(
    mixer: nn.Module, module: nn.Module | None, x: Tensor, mask: Tensor | None = None
) -> dict[str, tuple[nn.Module, Call]]:
    """Who computes the layer: a module, for its weights, and a call. A padded batch is ours alone."""
    found: dict[str, tuple[nn.Module, Call]] = {
        "loop": (mixer, lambda x: mixer(x, mask=mask, mode="chunked"))
    }
    if x.is_cuda and isinstance(mixer, LSTM):
        found["loop in torch"] = (mixer, partial(in_torch, mixer, mask))
    if module is None:
        return found
    if is_fused(x):
        found["fused"] = (mixer, lambda x: mixer(x, mask=mask))
    if mask is not None:
        return found
    if x.dtype != torch.float32:
        return found | {"torch": (module, partial(scattered, module))}
    for allowed in ("tf32", "ieee"):
        found[f"torch, {allowed}"] = (module, under(allowed, module))
    return found


def is_fused(x: Tensor) -> bool:
    return not x.is_cuda or x.dtype != torch.float32


def in_torch(mixer: nn.Module, mask: Tensor | None, x: Tensor) -> Any:
    with dispatch.use_backend("torch"):
        return mixer(x, mask=mask)


def scattered(module: nn.Module, x: Tensor) -> Any:
    """torch's module in bfloat16, whose weights its `flatten_parameters` leaves apart; it warns of that at every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module(x)


def under(allowed: str, module: nn.Module) -> Call:
    """The module with a precision of float32 products, in forward; `results` and `once` keep it for backward."""

    def call(x: Tensor) -> Any:
        torch.backends.cudnn.rnn.fp32_precision = allowed  # type: ignore[attr-defined]
        return module(x)

    return call


def results(call: Call, x: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """y, and the gradients of x and of both matrices."""
    x = x.detach().requires_grad_()
    y = call(x)[0]
    grads = torch.autograd.grad((y.double() * y.detach().double().cos()).sum(), [x, *weights.values()])
    return {"y": y.detach(), **dict(zip(["d_x", *(f"d_{name}" for name in weights)], grads, strict=True))}


def own(module: nn.Module) -> dict[str, Tensor]:
    names = OURS if isinstance(module, seqzoo.TokenMixer) else THEIRS
    return {key: module.get_parameter(name) for key, name in names.items()}


def check(case: str, shape: Shape, dtype: torch.dtype, padded: bool, device: str) -> dict[str, Any]:
    """Largest error over what law 8 allows, of each way."""
    mixer, module = pair(case, shape[2], dtype, device)
    x = torch.randn(shape, device=device).to(dtype)
    mask = torch.rand(shape[:2], device=device) < 0.7 if padded else None
    calls = ways(mixer, module, x, mask)
    found = {who: results(call, x, own(owner)) for who, (owner, call) in calls.items()}
    with dispatch.use_backend("reference"):
        reference = results(lambda x: mixer(x, mask=mask), x, own(mixer))
        mixer.double()
        exact = results(lambda x: mixer(x, mask=mask), x.double(), own(mixer))
    shares = {}
    for who, values in found.items():
        share = 0.0
        for key, wanted in exact.items():
            error = (values[key].double() - wanted).abs().max().item()
            share = max(share, error / precision.allowed_error(wanted, reference[key], dtype))
        shares[who] = round(share, 3)
    return {
        "check": f"{case} {list(shape)} {str(dtype)[6:]}{', padded' * padded}",
        "passed": all(share <= 1 for who, share in shares.items() if not who.startswith("torch")),
        "share of the allowed error": shares,
    }


def speed(case: str, shape: Shape, dtype: torch.dtype, device: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds of forward and of forward with backward; rounds alternate, the first is not counted."""
    mixer, module = pair(case, shape[2], dtype, device)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    runs = ways(mixer, module, x)
    if module is not None and is_fused(x):
        name, projection = CASES[case][0], mixer.get_submodule("in_proj")
        assert fused_rnn.serves(name, x, projection, mixer.get_parameter("recurrent_weight"))
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in runs}
    for _ in range(repeats + 1):
        for who, (_, call) in runs.items():
            times[who].append(once(call, x))
    median = {
        who: [round(statistics.median(column), 3) for column in zip(*rows[1:], strict=True)]
        for who, rows in times.items()
    }
    return {
        "mixer": case,
        "shape": list(shape),
        "dtype": str(dtype)[6:],
        "forward": {who: forward for who, (forward, _) in median.items()},
        "forward and backward": {who: both for who, (_, both) in median.items()},
    }


def once(call: Call, x: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward pass, and of it with its backward pass, by events on the device."""
    marks = [torch.Event(x.device, enable_timing=True) for _ in range(3)]
    marks[0].record()
    y = call(x)[0]
    marks[1].record()
    y.backward(torch.ones_like(y))
    marks[2].record()
    torch.accelerator.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[0].elapsed_time(marks[2])


def main() -> None:
    """Run the checks, then the timings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="another than a GPU runs the checks alone")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("error", message="RNN module weights are not part of single contiguous chunk")
    times: list[dict[str, Any]] = []
    more = {"cudnn": torch.backends.cudnn.version(), "milliseconds": times}
    log = output.Log(args.json, torch.device(args.device), **more)
    for case, shape, dtype, padded in itertools.product(CASES, CHECKS, DTYPES, (False, True)):
        log.add(check(case, shape, dtype, padded, args.device))
    if args.device.startswith("cuda"):
        for case, shape, dtype in itertools.product(CASES, SPEED, DTYPES):
            log.add(speed(case, shape, dtype, args.device, args.repeats), times)
    log.finish()


if __name__ == "__main__":
    main()
