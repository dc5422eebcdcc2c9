"""No kernel is compiled for another T or another pack once a process is warm; found by compiling for sm_90 alone.

Up to 16 and up to 32 tokens gated_linear_attention has kernels of its own, which are left out here for the time they take.
"""

import random

import hopper
import pytest
import torch

from seqzoo_kernels import attention, dispatch, gated_linear_attention, linear_scan

WARM = (130, 5000)  # for short and long tiles
D, H = 64, 2


def scan(B, T, cu_seqlens, *, phase=None):
    g, x = (torch.zeros(B, T, D, requires_grad=True) for _ in range(2))
    turn = None if phase is None else torch.zeros(D if phase == 1 else (B, T, D))
    return linear_scan(g, x, phase=turn, cu_seqlens=cu_seqlens)


def tokens(B, T, count):
    return [torch.zeros(B, T, H, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]


def gla(B, T, cu_seqlens, *, gates=4):
    decay = torch.zeros(*(B, T, H, D)[:gates], requires_grad=True) if gates else None
    return gated_linear_attention(*tokens(B, T, 3), decay, cu_seqlens=cu_seqlens)


def forgetting(B, T, cu_seqlens, *, window=None):
    gates = torch.zeros(B, T, H, requires_grad=True)
    return attention(*tokens(B, T, 3), gates, cu_seqlens=cu_seqlens, max_seqlen=T, window=window)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (scan, {}),
        (scan, {"phase": 1}),
        (gla, {"gates": 4}),
        (gla, {"gates": 3}),
        (forgetting, {"window": 50}),
    ],
)
def test_nothing_new_is_compiled(call, options, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "no_triton", lambda *_: None)
    draw = random.Random(0)

    def run(T, packed):
        cuts = sorted(draw.randrange(T + 1) for _ in range(draw.randrange(1, 6)))
        cu_seqlens = torch.tensor([0, *cuts, T]) if packed else None
        out, *_ = call(1 if packed else 2, T, cu_seqlens, **options)
        out.abs().sum().backward()

    with hopper.launches(monkeypatch, tmp_path) as found:
        for T in WARM:
            for packed in (False, True):
                run(T, packed)
        built = {id(kernel) for kernel in found}
        assert built
        for _ in range(50):
            run(draw.randrange(33, 5000), draw.random() < 0.5)
        new = [kernel.metadata.name for kernel in found if id(kernel) not in built]
    assert not new
