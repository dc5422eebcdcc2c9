"""A seqzoo.LanguageModel that the harness asks for likelihoods and continuations."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor

from seqzoo import LanguageModel
from seqzoo.lab.checkpoint import load_model

PIECE = 2048  # tokens of a long text that are read at once
IGNORED = {"do_sample", "until", "max_gen_toks", "max_tokens", "max_new_tokens", "num_beams"}
Item = TypeVar("Item")


@register_model("seqzoo")
class SeqzooLM(TemplateLM):
    """A language model of any mixers for the harness: log-likelihoods, rolling log-likelihoods, generation.

    A rolling log-likelihood is that of the whole text, however long: it is read in pieces, and the state goes on from one to
    the next, so no window cuts it.

    Args:
        model: a seqzoo.LanguageModel, or the folder or the checkpoint of `seqzoo train`.
        encode: text -> tokens; by default its bytes in UTF-8.
        decode: tokens -> text, for generation; by default from UTF-8.
        prefix: the token in front of a text that has nothing in front of it; by default a line feed.
        batch_size: texts that are read at once.
        max_gen_toks: tokens to generate where a task does not say.
        device: where to compute; by default where the model is.

    Raises:
        ValueError: the model has no token `prefix`. Others as `seqzoo.lab.checkpoint.load_model`.
    """

    def __init__(
        self,
        model: LanguageModel | str | Path,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        prefix: int = 10,
        batch_size: int | str = 8,
        max_gen_toks: int = 128,
        device: str | None = None,
        **harness: Any,
    ) -> None:
        super().__init__()
        model = model if isinstance(model, LanguageModel) else load_model(model)
        vocab_size = model.config["vocab_size"]
        if not 0 <= prefix < vocab_size:
            raise ValueError(
                f"SeqzooLM: expected prefix to be one of the model's {vocab_size} tokens, got {prefix}."
            )
        self.model = model.to(device).eval() if device else model.eval()
        self.encode = encode or (lambda text: list(text.encode()))
        self.decode = decode or (lambda tokens: bytes(tokens).decode(errors="replace"))
        self.prefix, self.batch_size, self.max_gen_toks = prefix, int(batch_size), max_gen_toks
        self.place = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self.encode(string))

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): the log-likelihood of the continuation, and whether it is the likeliest."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for some in _batches(order, self.batch_size):
            pairs = [requests[i][1:] for i in some]
            tokens, mask = self._padded([[*context, *continuation] for context, continuation in pairs])
            logits, _ = self.model(tokens[:, :-1], mask=mask[:, :-1])
            for i, (context, continuation), row, given in zip(some, pairs, logits, tokens, strict=True):
                here = slice(len(context) - 1, len(context) + len(continuation) - 1)
                results[i] = _likelihood(row[here], given[1:][here])
        return results

    @torch.no_grad()
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for (text,) in (request.args for request in requests):
            tokens = torch.tensor([self.prefix, *self.encode(text)], device=self.place)
            total, state = 0.0, None
            for start in range(0, len(tokens) - 1, PIECE):
                given = tokens[start : start + PIECE + 1]
                logits, state = self.model(given[None, :-1], state)
                total += _likelihood(logits[0], given[1:])[0]
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._continuation(*request.args) for request in requests]

    def _continuation(self, context: str, options: dict[str, Any]) -> str:
        """What follows up to a stop, or `max_gen_toks` tokens."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        count = next(
            (options[key] for key in ("max_gen_toks", "max_tokens", "max_new_tokens") if options.get(key)),
            self.max_gen_toks,
        )
        how = {key: value for key, value in options.items() if key not in IGNORED and value is not None}
        sampled = options.get("do_sample", how.get("temperature", 0) > 0)
        how["temperature"] = how.get("temperature", 1.0) if sampled else 0
        prompt = torch.tensor([list(self.encode(context)) or [self.prefix]], device=self.place)
        tokens: list[int] = []
        text = ""
        for token in self.model.stream(prompt, count, **how):
            tokens.append(int(token))
            text = self.decode(tokens)
            ends = [text.find(stop) for stop in stops if stop in text]
            if ends:
                return text[: min(ends)]
        return text

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.place)
        lengths = torch.tensor([len(row) for row in rows], device=self.place)
        return tokens, torch.arange(longest, device=self.place) < lengths[:, None]


def _likelihood(logits: Tensor, tokens: Tensor) -> tuple[float, bool]:
    """Of tokens [T] given logits [T, V]: the sum of log-probabilities, and whether each is the likeliest."""
    log_p = logits.double().log_softmax(-1).gather(-1, tokens[:, None])
    return log_p.sum().item(), bool((logits.argmax(-1) == tokens).all())


def _batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
