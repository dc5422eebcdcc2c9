"""The command ``seqzoo generate``."""

from __future__ import annotations

import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from seqzoo import TokenMixer
from seqzoo.lab.errors import LabError, asked_by_user
from seqzoo.lab.machine import find_device, set_threads

BYTES = 256


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint of `seqzoo train`, or a run's folder for its newest.")
    ],
    prompt: Annotated[str, typer.Option(help="What the text starts with.")] = "\n",
    max_new_tokens: Annotated[int, typer.Option(help="Bytes to add.")] = 256,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest bytes that hold this share of probability.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest byte each time.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Of what is drawn; the same one gives the same text.")
    ] = None,
    mixer: Annotated[
        list[str], typer.Option(help="A package.module:Class that the checkpoint names; it will be imported.")
    ] = [],  # noqa: B006
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to torch.")] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Write what a trained model of bytes makes of a prompt, as it comes."""
    from seqzoo.lab.checkpoint import load_model

    if seed is not None and seed < 0:
        raise LabError(f"seed: expected 0 or more, got {seed}")
    set_threads(threads)
    device = find_device(device)
    model = load_model(checkpoint, mixers=[own_mixer(name) for name in mixer], device=device)
    if model.embedding.num_embeddings != BYTES:
        raise LabError(
            f"generate: expected a model of {BYTES} bytes, got {model.embedding.num_embeddings} tokens"
        )
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    read = os.fsencode(prompt)
    with asked_by_user():
        tokens = model.stream(
            torch.tensor([list(read)]),
            max_new_tokens,
            temperature=0 if greedy else temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        )
    out = sys.stdout.buffer
    out.write(read)
    out.flush()
    start = time.perf_counter()
    for token in tokens:
        out.write(bytes(token.tolist()))
        out.flush()
    seconds = time.perf_counter() - start
    if sys.stdout.isatty():
        out.write(b"\n")
        out.flush()
    speed = f"{max_new_tokens / seconds:,.0f} bytes a second"
    print(f"{len(read):,} bytes read, {max_new_tokens:,} written, {speed}", file=sys.stderr)


def own_mixer(name: str) -> type[TokenMixer]:
    """The class "package.module:Class", imported on the user's word."""
    sys.path.insert(0, "")  # as `python -m` does
    with asked_by_user():
        if ":" not in name:
            raise ValueError(f"mixer: expected package.module:Class, got {name!r}")
        try:
            found = pkgutil.resolve_name(name)
        except AttributeError as error:
            raise ValueError(f"mixer: {error}") from error
        if not (isinstance(found, type) and issubclass(found, TokenMixer)):
            raise TypeError(f"mixer: expected a subclass of TokenMixer, got {name!r}")
    return found
