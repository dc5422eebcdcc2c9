"""attention through xformers on a GPU: law 8 against float64 for whole passes, windows, packs and grouped heads.

    python scripts/gpu_xformers.py [--json FILE]

Prints a row a case and one summary line; fails if any case does. Beside a PyTorch for CUDA 13 it needs the package
nvidia-cuda-runtime-cu12.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from gpu_attention import DTYPES, inputs, results

from seqzoo_kernels import precision
from seqzoo_kernels.bench import output

PACK = [0, 0, 13, 500, 1000]
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("plain", (2, 500, 4, 4, 64, 64), {}),
    ("scaled, grouped", (2, 500, 4, 2, 128, 128), {"scale": 0.2}),
    ("window", (2, 500, 4, 2, 64, 64), {"window": 100}),
    ("pack", (1, 1003, 4, 2, 64, 64), {"cu_seqlens": PACK}),
    ("pack, window", (1, 1003, 4, 4, 128, 128), {"cu_seqlens": PACK, "window": 77}),
]


def check(sizes: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> float:
    """Largest error over what law 8 allows."""
    B, T, H, G, K, V = sizes
    options = {n: torch.tensor(x, device="cuda") if n == "cu_seqlens" else x for n, x in options.items()}
    given = inputs(B, T, H, G, K, V, 0, dtype, decay=False)
    weights = torch.randn(B, T, H, V, device="cuda").to(dtype)
    one = results(given, weights, "xformers", **options)
    exact = results({n: t.double() for n, t in given.items()}, weights.double(), "torch", **options)
    reference = results(given, weights, "reference", **options)
    worst = 0.0
    for name, wanted in exact.items():
        precision.check_close(one[name], wanted, reference[name], dtype=dtype, name=name)
        allowed = precision.allowed_error(wanted, reference[name], dtype)
        worst = max(worst, (one[name].double() - wanted).abs().max().item() / allowed)
    return worst


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    log = output.Log(args.json, torch.device("cuda"))
    for dtype, (name, sizes, options) in itertools.product(DTYPES, CASES):
        log.add(output.judged({"check": f"{name} {list(sizes)} {dtype}"}, check, sizes, dtype, options))
    log.finish()


if __name__ == "__main__":
    main()
