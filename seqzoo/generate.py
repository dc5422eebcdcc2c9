"""Generation: one pass over the prompts, then a token at a time, written into the state in place.

A model that has read x_1 .. x_t gives the logits of x_{t+1}; a token is chosen from them and read in its turn. What is
generated is what whole passes over the growing sequence would give, at the cost of one step a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .states import map_state

if TYPE_CHECKING:
    from .model import LanguageModel

Prompts = Tensor | Sequence[Tensor]
Choice = Callable[[Tensor], Tensor]
STEPS_BETWEEN_CHECKS = 16  # of whether all rows have stopped, where a look waits for the device


class Generated(NamedTuple):
    """tokens [B, n]; lengths [B], how many of them each row has up to and with its eos; the state to go on from."""

    tokens: Tensor
    lengths: Tensor
    state: Any


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    state: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    eos: int | None = None,
    pad: int | None = None,
) -> Generated:
    """The tokens that follow each prompt; see `LanguageModel.generate`."""
    tokens, mask = _check_prompts(model, prompts, mask)
    _check_count("max_new_tokens", max_new_tokens, 0)
    choose = _choice(tokens.device, temperature, top_k, top_p, generator)
    pad = _check_end(model, eos, pad)
    with _evaluating(model):
        logits, state = _prefill(model, tokens, mask, state)
        start = None if eos is None else map_state(torch.clone, state)  # steps will write into the state
        produced = []
        for token, before in _steps(model, logits, state, max_new_tokens, choose, eos, pad):
            produced.append(token)
            state = before
        out = torch.stack(produced, 1) if produced else tokens[:, :0]
        lengths = torch.full(out.shape[:1], out.shape[1], device=out.device)
        if eos is None or not out.numel():
            return Generated(out, lengths, state)
        ends = out == eos
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, lengths)
        if int(lengths.min()) < out.shape[1]:
            # some rows have read pads behind their end: read again, without those
            out = out[:, : int(lengths.max())]
            read = torch.arange(out.shape[1], device=out.device) < lengths[:, None] - 1
            state = model.backbone(model.embedding(out), start, mask=read)[1]
    return Generated(out, lengths, state)


def stream(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    state: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    eos: int | None = None,
    pad: int | None = None,
) -> Iterator[Tensor]:
    """The same tokens as they come, [B] at a time; see `LanguageModel.stream`."""
    tokens, mask = _check_prompts(model, prompts, mask)
    _check_count("max_new_tokens", max_new_tokens, 0)
    choose = _choice(tokens.device, temperature, top_k, top_p, generator)
    return _stream(model, tokens, mask, state, max_new_tokens, choose, eos, _check_end(model, eos, pad))


@torch.no_grad()
def _stream(
    model: LanguageModel,
    tokens: Tensor,
    mask: Tensor | None,
    state: Any,
    count: int,
    choose: Choice,
    eos: int | None,
    pad: int,
) -> Iterator[Tensor]:
    with _evaluating(model):
        logits, state = _prefill(model, tokens, mask, state)
        for token, _ in _steps(model, logits, state, count, choose, eos, pad):
            yield token


def _prefill(model: LanguageModel, tokens: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
    """Logits [B, vocab_size] after the last token of each prompt, and the state there."""
    y, state = model.backbone(model.embedding(tokens), state, mask=mask)
    if mask is None:
        return model.logits(y[:, -1]), state
    place = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(mask, place, -1).amax(1)
    return model.logits(y[torch.arange(y.shape[0], device=y.device), last]), state


def _steps(
    model: LanguageModel, logits: Tensor, state: Any, count: int, choose: Choice, eos: int | None, pad: int
) -> Iterator[tuple[Tensor, Any]]:
    """Each token [B], with the state that has read all before it. The state is written into by the next step."""
    state = model.reserve(state, max(count - 1, 0))  # the last token is chosen, not read
    done = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    between = 1 if logits.device.type == "cpu" else STEPS_BETWEEN_CHECKS
    for made in range(1, count + 1):
        token = choose(logits)
        if eos is not None:
            token = token.masked_fill(done, pad)
            done = done | (token == eos)
        yield token, state
        if made == count or (eos is not None and made % between == 0 and bool(done.all())):
            return
        logits, state = model.step(token, state, donate=True)


def _choice(
    device: torch.device,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Choice:
    """The function that chooses tokens [B] from logits [B, V], once its options are checked."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"generate: expected temperature to be a number, got {temperature!r}.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"generate: expected temperature to be at least 0, which takes the likeliest token, got {temperature}."
        )
    if top_k is not None:
        _check_count("top_k", top_k, 1)
    if top_p is not None and (isinstance(top_p, bool) or not isinstance(top_p, int | float)):
        raise TypeError(f"generate: expected top_p to be a number, got {top_p!r}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: expected top_p to be above 0 and at most 1, got {top_p}.")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(
            f"generate: expected generator to be on the model's device {device.type}, got {generator.device.type}."
        )
    if temperature == 0:
        return lambda logits: logits.argmax(-1)
    return lambda logits: sample(logits, temperature, top_k, top_p, generator)


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A token [B] from each row of logits [B, V]: softmax(logits / temperature), cut to the `top_k` likeliest, and of these to
    the fewest that hold a share `top_p` of their probability.

    argmax(log p + Gumbel noise) is a sample of p, and waits for no device.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    order = None
    if top_k is not None or (top_p is not None and top_p < 1):
        # stable: of equal ones the first, as argmax
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        scores, order = scores[:, :top_k], order[:, :top_k]
    noise = torch.empty_like(scores).exponential_(generator=generator)
    noisy = (
        scores - noise.clamp_min(torch.finfo(scores.dtype).eps / 4).log()
    )  # a zero would win against any score
    if top_p is not None and top_p < 1:
        share = scores.softmax(-1)
        noisy = noisy.masked_fill(share.cumsum(-1) - share >= top_p, -float("inf"))
    token = noisy.argmax(-1, keepdim=True)
    return (token if order is None else order.gather(-1, token))[:, 0]


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    """Without dropout; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_prompts(
    model: LanguageModel, prompts: Prompts, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, T] and their mask, on the model's device; no mask if it would be full."""
    device = model.embedding.weight.device
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise ValueError(
                f"generate: expected prompts of shape (B, T), or a list of 1-D tensors, got {tuple(prompts.shape)}."
            )
        _check_integers("prompts", prompts)
        tokens = prompts.to(device, torch.long)
    else:
        if mask is not None:
            raise ValueError("generate: expected mask with prompts of shape (B, T); a list needs none.")
        tokens, mask = _pad_right(prompts, device)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"generate: expected mask to be a bool tensor, True where there is a token, got {got}."
            )
        if mask.shape != tokens.shape:
            raise ValueError(
                f"generate: expected mask of shape (B, T) = {tuple(tokens.shape)}, got {tuple(mask.shape)}."
            )
        mask = mask.to(device)
        tokens = tokens.masked_fill(~mask, 0)
    empty = torch.full((len(tokens),), tokens.shape[1] == 0) if mask is None else ~mask.any(1)
    if bool(empty.any()):
        raise ValueError(
            f"generate: expected each prompt to have a token, got none in row {int(empty.int().argmax())}."
        )
    if tokens.numel():
        low, high = (int(bound) for bound in tokens.aminmax())
        vocab_size = model.embedding.num_embeddings
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"generate: expected prompts to hold tokens from 0 to vocab_size - 1 = {vocab_size - 1}, "
                f"got {low if low < 0 else high}."
            )
    return tokens, None if mask is None or bool(mask.all()) else mask


def _pad_right(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            f"generate: expected prompts to be a tensor or a list of tensors, got {type(prompts).__name__}."
        )
    if not prompts:
        raise ValueError("generate: expected prompts to hold at least one prompt, got an empty list.")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Tensor):
            raise TypeError(f"generate: expected prompts[{i}] to be a tensor, got {type(prompt).__name__}.")
        if prompt.dim() != 1:
            raise ValueError(f"generate: expected prompts[{i}] of shape (T), got {tuple(prompt.shape)}.")
        _check_integers(f"prompts[{i}]", prompt)
    rows = [prompt.to(device, torch.long) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(tokens.shape[1], device=device) < lengths[:, None]


def _check_integers(name: str, tokens: Tensor) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"generate: expected {name} to hold integers, got {tokens.dtype}.")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"generate: expected {name} to be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"generate: expected {name} to be at least {least}, got {value}.")


def _check_end(model: LanguageModel, eos: int | None, pad: int | None) -> int:
    """The token for rows that have stopped: `pad`, by default `eos`."""
    vocab_size = model.embedding.num_embeddings
    for name, token in (("eos", eos), ("pad", pad)):
        if token is not None:
            _check_count(name, token, 0)
            if token >= vocab_size:
                raise ValueError(
                    f"generate: expected {name} to be a token from 0 to vocab_size - 1 = {vocab_size - 1}, got {token}."
                )
    if pad is not None and eos is None:
        raise ValueError("generate: expected pad with eos: no row stops without one.")
    return (eos or 0) if pad is None else pad
