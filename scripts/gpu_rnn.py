"""lstm without peepholes and gru beside torch.nn.LSTM and torch.nn.GRU on a GPU: law 8 against float64 first, then speed.

    python scripts/gpu_rnn.py [--json FILE] [--device cuda]

torch's modules run cuDNN, which rounds float32 products to TF32 unless told not to; both ways are judged by law 8 and timed, in
the order that alternates. Prints a row a case and one summary line; fails if ours breaks the law.
"""

import argparse
import datetime
import json
import platform
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqzoo
from seqzoo_kernels import dispatch, precision

CHECKS = ((3, 257, 64), (2, 64, 512))
SPEED = ((16, 1024, 512), (8, 2048, 1024))
OPTIONS: dict[str, dict[str, Any]] = {"lstm": {"variant": "NP"}, "gru": {}}
THEIRS = {"lstm": nn.LSTM, "gru": nn.GRU}


def pair(name: str, dim: int, device: str) -> tuple[seqzoo.TokenMixer, nn.Module]:
    """Our mixer and torch's module with the same weights."""
    torch.manual_seed(dim)
    mixer = seqzoo.create_mixer(name, dim, **OPTIONS[name]).to(device)
    module = THEIRS[name](dim, dim, batch_first=True).to(device)
    weights = dict(mixer.named_parameters())
    with torch.no_grad():
        module.get_parameter("weight_ih_l0").copy_(weights["in_proj.weight"])
        module.get_parameter("weight_hh_l0").copy_(weights["recurrent_weight"])
        module.get_parameter("bias_ih_l0").copy_(weights["in_proj.bias"])
        hidden = module.get_parameter("bias_hh_l0").zero_()
        if name == "gru":
            hidden.copy_(F.pad(weights["recurrent_bias"], (2 * dim, 0)))
    return mixer, module


def results(call: Callable[[Tensor], Any], x: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """y, and the gradients of x and of both matrices."""
    x = x.detach().requires_grad_()
    y = call(x)[0]
    grads = torch.autograd.grad((y.double() * y.detach().double().cos()).sum(), [x, *weights.values()])
    return {"y": y.detach(), **dict(zip(["d_x", *(f"d_{name}" for name in weights)], grads, strict=True))}


def tf32(allowed: bool) -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed)


def check(name: str, B: int, T: int, D: int, device: str) -> dict[str, Any]:
    """Largest error over what law 8 allows: of ours, and of torch's with and without TF32."""
    mixer, module = pair(name, D, device)
    x = torch.randn(B, T, D, device=device)
    ours = {"in": "in_proj.weight", "recurrent": "recurrent_weight"}
    theirs = {"in": "weight_ih_l0", "recurrent": "weight_hh_l0"}
    own = {key: mixer.get_parameter(value) for key, value in ours.items()}
    its = {key: module.get_parameter(value) for key, value in theirs.items()}
    found = {"ours": results(mixer, x, own)}
    for allowed in (True, False):
        with tf32(allowed):
            found[f"torch, TF32 {'on' if allowed else 'off'}"] = results(module, x, its)
    with dispatch.use_backend("reference"):
        reference = results(mixer, x, own)
        mixer.double()
        exact = results(mixer, x.double(), {key: mixer.get_parameter(value) for key, value in ours.items()})
    shares = {}
    for who, values in found.items():
        share = 0.0
        for key, wanted in exact.items():
            error = (values[key].double() - wanted).abs().max().item()
            share = max(share, error / precision.allowed_error(wanted, reference[key], torch.float32))
        shares[who] = round(share, 3)
    return {
        "check": f"{name} [{B}, {T}, {D}]",
        "passed": shares["ours"] <= 1,
        "share of the allowed error": shares,
    }


def speed(name: str, B: int, T: int, D: int, device: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds of forward and of forward with backward; rounds alternate, the first is not counted."""
    mixer, module = pair(name, D, device)
    x = torch.randn(B, T, D, device=device, requires_grad=True)
    runs = {"ours": (mixer, True), "torch, TF32 on": (module, True), "torch, TF32 off": (module, False)}
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in runs}
    for _ in range(repeats + 1):
        for who, (call, allowed) in runs.items():
            with tf32(allowed):
                times[who].append(once(call, x))
    median = {
        who: [round(statistics.median(column), 3) for column in zip(*rows[1:], strict=True)]
        for who, rows in times.items()
    }
    fastest = min(sum(median[who]) for who in median if who != "ours")
    return {
        "mixer": name,
        "shape": [B, T, D],
        "forward": {who: forward for who, (forward, _) in median.items()},
        "backward": {who: backward for who, (_, backward) in median.items()},
        "torch's time over ours": round(fastest / sum(median["ours"]), 3),
    }


def once(call: Callable[[Tensor], Any], x: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward pass and of its backward pass, by events on the device."""
    marks = [torch.Event(x.device, enable_timing=True) for _ in range(3)]
    marks[0].record()
    y = call(x)[0]
    marks[1].record()
    y.backward(torch.ones_like(y))
    marks[2].record()
    torch.accelerator.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def main() -> None:
    """Run the checks, then the timings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="another than a GPU runs the checks alone")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows, times = [], []
    for name in OPTIONS:
        for shape in CHECKS:
            rows.append(check(name, *shape, args.device))
            print(rows[-1], flush=True)
    if args.device.startswith("cuda"):
        for name in OPTIONS:
            for shape in SPEED:
                times.append(speed(name, *shape, args.device, args.repeats))
                print(times[-1], flush=True)
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    if args.json:
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine(),
            "versions": {
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "python": platform.python_version(),
            },
            "rows": rows,
            "milliseconds": times,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
