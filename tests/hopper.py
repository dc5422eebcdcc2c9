"""What a backend launches, compiled for sm_90 and not run: no GPU is needed."""

from collections.abc import Iterator
from contextlib import contextmanager

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024  # bytes that a program may have there


class NoDevice:
    """What Triton asks a driver for before it compiles."""

    def get_current_device(self) -> int:
        return -1  # of no GPU that may be there: what is compiled here is kept apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def launches(monkeypatch, cache) -> Iterator[list[CompiledKernel]]:
    """Inside, `kernel[grid](...)` compiles for the arguments it is given, tensors on a CPU, and adds what came out."""
    found: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        found.append(run(self, *args, grid=grid, warmup=True, **{"enable_fp_fusion": True, **options}))

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(cache))
        patch.setattr(triton.runtime.driver, "_active", NoDevice())
        patch.setattr(JITFunction, "run", compile_only)
        yield found
