"""``seqzoo bench``: a training step and decoding of each mixer, beside the plain code for it.

The plain code of a mixer is the same model on ops as a paper's formula spells them out: a loop over time, or the whole score
matrix. Where transformers is installed, its Llama and Mamba of the same width and depth decode too.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import seqzoo
from seqzoo.lab.errors import asked_by_user
from seqzoo.lab.measure import decode_speed
from seqzoo_kernels import use_backend

VOCAB = 256


@dataclass(frozen=True)
class Shape:
    """Of the model and its input."""

    dim: int = 256
    depth: int = 6
    batch_size: int = 4
    length: int = 512


@dataclass(frozen=True)
class Figure:
    """One measurement: a mixer, whose code, what it measures, and how much."""

    mixer: str
    code: str
    quantity: str
    value: float


def training_figures(mixers: Sequence[str], shape: Shape, repeats: int = 3) -> list[Figure]:
    """Milliseconds of a forward and backward pass, ours and the plain code's taken in turn; medians."""
    figures = []
    for mixer in mixers:
        model = _model(mixer, shape)
        tokens = torch.randint(VOCAB, (shape.batch_size, shape.length + 1))
        times: dict[str, list[float]] = {"seqzoo": [], "plain": []}
        for _ in range(repeats + 1):
            for code, taken in times.items():
                with _plain_ops() if code == "plain" else nullcontext():
                    taken.append(_seconds(partial(_train_step, model, tokens)))
        figures += [
            Figure(mixer, c, "training ms/step", 1e3 * statistics.median(t[1:])) for c, t in times.items()
        ]
    return figures


def decode_figures(
    mixers: Sequence[str], shape: Shape, contexts: Sequence[int] = (256, 2048)
) -> list[Figure]:
    """Tokens per second of greedy decoding, mean over a context from empty to full."""
    figures = []
    for context in contexts:
        for mixer in mixers:
            speed = decode_speed(_model(mixer, shape), context, repeats=1)
            figures.append(Figure(mixer, "seqzoo", f"decode tokens/s to {context}", speed))
        for code, mixer, generate in _transformers_models(shape):
            seconds = _seconds(partial(generate, context))
            figures.append(Figure(mixer, code, f"decode tokens/s to {context}", context / seconds))
    return figures


@contextmanager
def _plain_ops() -> Iterator[None]:
    """Ops as one would write them first, without the reference's care for rounding. Attention's reference is that already."""
    scan, matrix = (
        importlib.import_module(f"seqzoo_kernels.{op}.reference")
        for op in ("linear_scan", "gated_linear_attention")
    )
    with (
        patch.object(scan, "forward", _plain_scan),
        patch.object(matrix, "forward", _plain_gated_linear_attention),
        use_backend("reference"),
    ):
        yield


def _plain_scan(log_decay: Tensor, x: Tensor, phase: Tensor | None, state: Tensor, *_: Any) -> Any:
    decay = (
        log_decay.exp() if phase is None else torch.polar(*torch.broadcast_tensors(log_decay.exp(), phase))
    )
    h, out = state, []
    for a, x_t in zip(decay.expand(x.shape).unbind(1), x.unbind(1), strict=True):
        h = a * h + x_t
        out.append(h)
    return torch.stack(out, 1), h


def _plain_gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, _: None, scale: float, *__: Any
) -> Any:
    out = []
    for q_t, k_t, v_t, a in zip(*(t.unbind(1) for t in (q * scale, k, v, log_decay.exp())), strict=True):
        state = a[..., None] * state + k_t[..., None] * v_t[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(out, 1), state


def _model(mixer: str, shape: Shape) -> seqzoo.LanguageModel:
    torch.manual_seed(0)
    with asked_by_user():
        return seqzoo.LanguageModel(VOCAB, shape.dim, shape.depth, mixer=mixer)


def _train_step(model: seqzoo.LanguageModel, tokens: torch.Tensor) -> None:
    model.loss(tokens).backward()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _transformers_models(shape: Shape) -> list[tuple[str, str, Callable[[int], None]]]:
    """(code, what it is nearest to, function that decodes so many tokens) of transformers' models, if it is there."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
    except ImportError:
        return []
    llama = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.dim,
        intermediate_size=-(-8 * shape.dim // 48) * 16,
        num_hidden_layers=shape.depth,
        num_attention_heads=max(1, shape.dim // 64),
    )
    mamba = MambaConfig(vocab_size=VOCAB, hidden_size=shape.dim, num_hidden_layers=shape.depth)
    models = (
        ("transformers Llama", "attention", LlamaForCausalLM(llama)),
        ("transformers Mamba", "gla", MambaForCausalLM(mamba)),
    )

    def decoder(model: torch.nn.Module) -> Callable[[int], None]:
        @torch.no_grad()
        def decode(count: int) -> None:
            start = torch.zeros(1, 1, dtype=torch.long)
            model.generate(  # type: ignore[operator]
                start, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
            )

        model.eval()
        decode(4)
        return decode

    return [(code, near, decoder(model)) for code, near, model in models]
