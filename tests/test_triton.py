"""Triton kernels without a GPU: run in Triton's interpreter, and compiled for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqzoo_kernels import linear_scan
from seqzoo_kernels.linear_scan import kernels

HERE = Path(__file__).parent


def test_interpreted_linear_scan():
    """The interpreter must be asked for before the kernels are imported, so it has a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(HERE / "interpreted_linear_scan.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


WIDE = {"state_ptr", "final_ptr", "d_final_ptr", "d_state_ptr", "carry_ptr"}
WHOLE = {"sequence_ptr", "ready_ptr"}
ALIGNED = {"D", "g_row", "g_step", "x_row", "x_step", "dy_row", "dy_step"}


@pytest.mark.parametrize(
    "kernel", [kernels.forward_kernel, kernels.backward_kernel], ids=["forward", "backward"]
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {}),
        ("fp16", {"CONSTANT": True}),
        ("fp32", {"EXACT": True, "S": 32, "L": 8, "BD": 16, "num_warps": 4}),
        ("bf16", {"PACKED": True, "REVERSE": True}),
    ],
)
def test_compiles_for_hopper(kernel, dtype, options, tmp_path, monkeypatch):
    """For sm_90 in each dtype, with loads of 16 bytes and little shared memory."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    given = {
        "CONSTANT": False,
        "REVERSE": False,
        "PACKED": False,
        "HAS_STATE": True,
        "CHAINED": True,
        "EXACT": False,
    }
    given |= {"S": 8, "L": 4, "BD": 32} | options
    warps = given.pop("num_warps", 1)
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        pointer = "*i32" if name in WHOLE else "*fp32" if name in WIDE else f"*{dtype}"
        signature[name] = "constexpr" if name in given else pointer if name.endswith("_ptr") else "i32"
        if name.endswith("_ptr") or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=attributes)
    built = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    )
    assert built.asm["cubin"]
    assert built.metadata.shared <= 8192
    assert "ld.global.v4" in built.asm["ptx"] or "ld.global.L1::evict_last.v4" in built.asm["ptx"]


def test_a_gpu_is_needed():
    x = torch.zeros(1, 3, 4)
    with pytest.raises(
        ValueError, match=r"linear_scan: backend 'triton' can't be used: it needs a GPU.*cpu.*torch"
    ):
        linear_scan(x, x, backend="triton")
