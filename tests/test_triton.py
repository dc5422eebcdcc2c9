"""Triton kernels without a GPU: run in Triton's interpreter, and compiled for one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqzoo_kernels import linear_scan
from seqzoo_kernels.linear_scan import kernels, rotating
from seqzoo_kernels.lstm import CELLS
from seqzoo_kernels.lstm import kernels as lstm_kernels

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(HERE.glob("interpreted_*.py")), ids=lambda file: file.stem)
def test_interpreted(file):
    """The interpreter must be asked for before the kernels are imported, so it has a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(file),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


WIDE = {"state_ptr", "final_ptr", "d_final_ptr", "d_state_ptr"}
POINTERS = {"words_ptr": "*i64", "sequence_ptr": "*i32"}
COMPLEX = {*WIDE, "out_ptr", "dy_ptr", "h_ptr"}  # of a rotating kernel; x and its gradient where x is
GIVEN = {
    "ALIGNED": 16,
    "D": 256,
    "g_step": 256,
    "phase_step": 256,
    "x_step": 256,
    "dy_step": 256,
    "CONSTANT": False,
    "STEADY": True,
    "COMPLEX": True,
    "REVERSE": False,
    "PACKED": False,
    "HAS_STATE": True,
    "CHAINED": True,
    "GROUP": 8,
    "EXACT": False,
    "S": 4,
    "L": 4,
    "BD": 64,
}


def compiled(kernel, pointers, options):
    """The kernel for sm_90, its tensors aligned."""
    given = {name: value for name, value in {**GIVEN, **options}.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in given else pointers(name) if name.endswith("_ptr") else "i32"
        if name.endswith("_ptr"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=attributes)
    build = {"num_warps": given.get("S", 4), "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=build)


@pytest.mark.parametrize(
    "kernel", [kernels.forward_kernel, kernels.backward_kernel], ids=["forward", "backward"]
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {}),
        ("fp16", {"CONSTANT": True}),
        ("fp32", {"EXACT": True, "S": 2, "L": 8}),
        ("bf16", {"PACKED": True, "REVERSE": True}),
    ],
)
def test_compiles_for_hopper(kernel, dtype, options, tmp_path, monkeypatch):
    """For sm_90 in each dtype; a thread loads its two channels at once, and what is handed on is read and written whole."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    built = compiled(
        kernel, lambda name: POINTERS.get(name, "*fp32" if name in WIDE else f"*{dtype}"), options
    )
    assert built.asm["cubin"]
    assert built.metadata.shared <= 8192
    ptx = built.asm["ptx"]
    assert ("ld.global.v2.b32" if dtype == "fp32" else "ld.global.b32") in ptx
    assert_words_are_whole(ptx)


@pytest.mark.parametrize(
    ("kernel", "dtype", "options"),
    [
        (rotating.forward_kernel, None, {}),
        (rotating.forward_kernel, "bf16", {"STEADY": False, "PACKED": True, "REVERSE": True}),
        (rotating.backward_kernel, None, {"CONSTANT": True}),
        (rotating.backward_kernel, "bf16", {"STEADY": False}),
    ],
    ids=["forward", "forward of real x, packed", "backward, constant", "backward of real x"],
)
def test_complex_states_compile_for_hopper(kernel, dtype, options, tmp_path, monkeypatch):
    """With a complex x, or a real one of `dtype` and decays and phases alike; complex numbers are read and written whole."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    whole = COMPLEX | ({"x_ptr", "dx_ptr"} if dtype is None else set())

    def pointers(name):
        return POINTERS.get(name, "*i64" if name in whole else f"*{dtype or 'fp32'}")

    options = {"L": 2, "COMPLEX": dtype is None, **options}
    built = compiled(kernel, pointers, options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= 16384
    assert "ld.global.v2.b64" in built.asm["ptx"]
    assert "st.global.v2.b64" in built.asm["ptx"] or ("dx_ptr" in kernel.arg_names and dtype)
    assert_words_are_whole(built.asm["ptx"])


@pytest.mark.parametrize("variant", sorted(CELLS.keys() - {"FGR"}))
@pytest.mark.parametrize(
    "kernel", [lstm_kernels.forward_kernel, lstm_kernels.backward_kernel], ids=["forward", "backward"]
)
def test_lstm_compiles_for_hopper(kernel, variant, tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    cell = CELLS[variant]
    places = {
        name: -1 if cell.place(gate) is None else cell.place(gate)
        for name, gate in zip("IFZO", "ifzo", strict=True)
    }
    options = {
        "n": 512, **places, "G": cell.blocks, "COUPLED": cell.coupled, "INPUT_TANH": cell.input_tanh,
        "OUTPUT_TANH": cell.output_tanh, "PEEPHOLES": variant != "NP", "BLOCK": 128,
    }  # fmt: skip
    built = compiled(kernel, lambda name: "*fp32", options)
    assert built.asm["cubin"]
    assert built.metadata.shared == 0


def assert_words_are_whole(ptx):
    assert "ld.volatile.global" in ptx
    assert not re.search(r"ld\.volatile\.global(?!\S*b64)", ptx)


def test_a_gpu_is_needed():
    x = torch.zeros(1, 3, 4)
    with pytest.raises(
        ValueError, match=r"linear_scan: backend 'triton' can't be used: it needs a GPU.*cpu.*torch"
    ):
        linear_scan(x, x, backend="triton")
