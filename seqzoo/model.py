"""Models out of mixers: a block, a stack, a language model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import generate as generation
from .bounds import FORMS, LowerBounds, takes_bound
from .directions import Bidirectional
from .mixer import Shared, TokenMixer
from .registry import create_mixer, mixer_from_config

MixerSpec = str | type[TokenMixer] | Mapping[str, Any]


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + SwiGLU(norm(x)).

    Called as a mixer is, and with the mixer's state.

    Args:
        mixer: of width D; without a state and steps if it is `Bidirectional`.
        ffn_dim: inner width of the SwiGLU.
        dropout: of both branches.
        norm_eps: of both norms.
    """

    def __init__(
        self, mixer: TokenMixer | Bidirectional, ffn_dim: int, *, dropout: float = 0.0, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        dim = mixer.dim
        self.mixer_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mixer: Any = mixer
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn_in = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.ffn_out = nn.Linear(ffn_dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: Any = None, **call: Any) -> tuple[Tensor, Any]:
        """y [B, T, D] and the state; keywords as `TokenMixer.forward`."""
        y, state = self.mixer(self.mixer_norm(x).to(x.dtype), state, **call)
        return self._feed(x + self.dropout(y)), state

    def step(self, x_t: Tensor, state: Any, **call: Any) -> tuple[Tensor, Any]:
        """y_t [B, D] and the state; keywords as `TokenMixer.step`."""
        y, state = self.mixer.step(self.mixer_norm(x_t).to(x_t.dtype), state, **call)
        return self._feed(x_t + self.dropout(y)), state

    def _feed(self, x: Tensor) -> Tensor:
        gate, value = self.ffn_in(self.ffn_norm(x)).chunk(2, -1)
        return x + self.dropout(self.ffn_out(F.silu(gate) * value))


class Backbone(nn.Module):
    """A stack of blocks, called as a mixer is: x [B, T, D] -> (y [B, T, D], state). The state is a tuple of the layers' states.

    Args:
        dim: width D.
        depth: number of blocks.
        mixer: a name, a class, a configuration {"name": ..., option: ...}, or a sequence of these that repeats over the depth.
        ffn_dim: inner width of the SwiGLU; by default 8/3 D, rounded up to a multiple of 16.
        dropout: of each branch.
        lower_bound: form of the hierarchical lower bound ("lm" or "exclusive") for the layers that read one, or None for none.
        activation_checkpointing: keep only the inputs of each block for backward, and run it again there.
        norm_eps: of the norms.

    Raises:
        ValueError, TypeError: an unknown mixer or option, an empty pattern, layers whose lower bounds differ in width.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        *,
        mixer: MixerSpec | Sequence[MixerSpec] = "hgrn2",
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        lower_bound: str | None = "lm",
        activation_checkpointing: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"Backbone: expected depth to be at least 1, got {depth}.")
        if lower_bound not in (None, *FORMS):
            raise ValueError(
                f"Backbone: expected lower_bound to be one of None, {', '.join(FORMS)}, got {lower_bound!r}."
            )
        pattern = _pattern(mixer)
        ffn_dim = ffn_dim or -(-8 * dim // 48) * 16
        mixers = [_build(pattern[i % len(pattern)], dim) for i in range(depth)]
        self.dim = dim
        self.blocks = nn.ModuleList(Block(m, ffn_dim, dropout=dropout, norm_eps=norm_eps) for m in mixers)
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.activation_checkpointing = activation_checkpointing
        self.bounded = [i for i, m in enumerate(mixers) if lower_bound and takes_bound(m)]
        widths = {mixers[i].shared_dim("lower_bound") for i in self.bounded}
        if len(widths) > 1:
            raise ValueError(
                f"Backbone: layers that share lower bounds have one width, got {sorted(widths)}; "
                "pass lower_bound=None or equal expansions."
            )
        self.lower_bounds = (
            LowerBounds(len(self.bounded), widths.pop(), lower_bound) if widths and lower_bound else None
        )

    @property
    def mixers(self) -> list[TokenMixer]:
        return [block.mixer for block in self.blocks]  # type: ignore[misc]

    def init_state(self, batch: int, capacity: int | None = None) -> tuple[Any, ...]:
        """The states of all layers before the first token; `capacity` is room in tokens for those that grow."""
        return tuple(m.init_state(batch, capacity) for m in self.mixers)

    def reserve(self, state: tuple[Any, ...], room: int) -> tuple[Any, ...]:
        """As `TokenMixer.reserve`, for every layer."""
        return tuple(m.reserve(s, room) for m, s in zip(self.mixers, self._states(state), strict=True))

    def state_size(self, length: int) -> int:
        """Bytes that the states of one sequence hold after `length` tokens."""
        return sum(m.state_size(length) for m in self.mixers)

    def forward(
        self,
        x: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        mode: str = "auto",
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """As `TokenMixer.forward`; y at pads and behind a pack has no meaning."""
        states = []
        call: dict[str, Any] = {
            "mode": mode,
            "mask": mask,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
        }
        for block, old, shared in zip(self.blocks, self._states(state), self._shared(), strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, new = checkpoint(block, x, old, use_reentrant=False, shared=shared, **call)
            else:
                x, new = block(x, old, shared=shared, **call)
            states.append(new)
        return self.norm(x), tuple(states)

    def step(
        self, x_t: Tensor, state: tuple[Any, ...], *, donate: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """As `TokenMixer.step`."""
        states = []
        for block, old, shared in zip(self.blocks, self._states(state), self._shared(), strict=True):
            x_t, new = block.step(x_t, old, shared=shared, donate=donate)  # type: ignore[operator]
            states.append(new)
        return self.norm(x_t), tuple(states)

    def _states(self, state: tuple[Any, ...] | None) -> Sequence[Any]:
        if state is None:
            return [None] * len(self.blocks)
        if not isinstance(state, tuple) or len(state) != len(self.blocks):
            raise TypeError(f"expected a state that is a tuple of the states of {len(self.blocks)} layers.")
        return state

    def _shared(self) -> list[Shared | None]:
        shared: list[Shared | None] = [None] * len(self.blocks)
        if self.lower_bounds is not None:
            for i, bound in zip(self.bounded, self.lower_bounds(), strict=True):
                shared[i] = {"lower_bound": bound}
        return shared


class LanguageModel(nn.Module):
    """Embedding, Backbone and a head that shares the embedding's weight: tokens [B, T] -> logits [B, T, vocab_size].

    Args:
        vocab_size: number of tokens.
        dim: width D.
        depth: number of blocks.
        mixer: as `Backbone`: "hgrn2", or a pattern that repeats, ["hgrn2", "hgrn2", "attention"].
        dropout: after the embedding and in each branch.
        ffn_dim: as `Backbone`.
        lower_bound: as `Backbone`.
        activation_checkpointing: as `Backbone`.
        norm_eps: as `Backbone`.

    Raises:
        ValueError, TypeError: as `Backbone`.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        depth: int,
        *,
        mixer: MixerSpec | Sequence[MixerSpec] = "hgrn2",
        dropout: float = 0.0,
        ffn_dim: int | None = None,
        lower_bound: str | None = "lm",
        activation_checkpointing: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.backbone = Backbone(
            dim,
            depth,
            mixer=mixer,
            ffn_dim=ffn_dim,
            dropout=dropout,
            lower_bound=lower_bound,
            activation_checkpointing=activation_checkpointing,
            norm_eps=norm_eps,
        )
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self._settings = {
            "vocab_size": vocab_size,
            "dim": dim,
            "depth": depth,
            "dropout": dropout,
            "ffn_dim": ffn_dim,
            "lower_bound": lower_bound,
            "activation_checkpointing": activation_checkpointing,
            "norm_eps": norm_eps,
        }

    @property
    def config(self) -> dict[str, Any]:
        """A JSON-able record: `LanguageModel.from_config(config)` builds the same model, untrained."""
        return {**self._settings, "mixer": [m.config for m in self.backbone.mixers]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LanguageModel":
        """The model of a `config`. Its mixers are registered names: nothing is imported on a file's word.

        Raises:
            ValueError: a name is not registered. ValueError, TypeError: as the constructor.
        """
        for mixer in config["mixer"]:
            mixer_from_config(mixer)
        return cls(**config)

    def init_state(self, batch: int, capacity: int | None = None) -> tuple[Any, ...]:
        """As `Backbone.init_state`."""
        return self.backbone.init_state(batch, capacity)

    def reserve(self, state: tuple[Any, ...], room: int) -> tuple[Any, ...]:
        """As `Backbone.reserve`."""
        return self.backbone.reserve(state, room)

    def state_size(self, length: int) -> int:
        """Bytes that the state of one sequence holds after `length` tokens."""
        return self.backbone.state_size(length)

    def forward(
        self,
        tokens: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        mode: str = "auto",
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits [B, T, vocab_size] and the state; keywords as `TokenMixer.forward`."""
        x = self.dropout(self.embedding(tokens))
        y, state = self.backbone(x, state, mode=mode, mask=mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        return self.logits(y), state

    def step(
        self, tokens_t: Tensor, state: tuple[Any, ...], *, donate: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits [B, vocab_size] of the token after tokens_t [B], and the state; `donate` as `TokenMixer.step`."""
        y, state = self.backbone.step(self.dropout(self.embedding(tokens_t)), state, donate=donate)
        return self.logits(y), state

    def loss(self, tokens: Tensor, **call: Any) -> Tensor:
        """Mean cross-entropy, in nats, of each token of [B, T + 1] but the first, given those before it."""
        logits, _ = self(tokens[:, :-1], **call)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def generate(
        self, prompts: generation.Prompts, max_new_tokens: int, **options: Any
    ) -> generation.Generated:
        """The tokens that follow each prompt, token by token what passes over the whole sequence would give.

        Runs without gradients and without dropout. Nothing waits for the device between steps, but with `eos` on an
        accelerator every 16 steps, to see whether all rows have stopped.

        Args:
            prompts: [B, T], or a list of B tensors [T_b] of any lengths, at least 1 each.
            max_new_tokens: n, how many tokens to add.
            mask: [B, T] bool, True where prompts [B, T] hold a token. Pads may stand anywhere.
            state: what the model has read before the prompts, as a call or an earlier `generate` returned it. It is not
                changed.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from this many likeliest tokens.
            top_p: draw from the fewest likeliest tokens that hold this share of the probability, in (0, 1]; after `top_k`.
            generator: what to draw from, on the model's device; torch's own by default.
            eos: a token that ends its row; generation stops early when all rows have ended.
            pad: what an ended row holds behind its eos; eos by default.

        Returns:
            (tokens, lengths, state): tokens [B, n], or fewer columns where all rows ended early; how many of them each row
            has, its eos included; and a state that has read all but the last of these. So
            `generate(tokens[:, -1:], m, state=state)` goes on.

        Raises:
            ValueError, TypeError: an option is not as above, or a token is outside the vocabulary.
        """
        return generation.generate(self, prompts, max_new_tokens, **options)

    def stream(self, prompts: generation.Prompts, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """`generate`, a step at a time: an iterator over tokens [B]. Until it ends or is closed the model is in evaluation
        mode. With `eos` on an accelerator, up to 15 steps of pads may follow after all rows have ended.

        Raises:
            ValueError, TypeError: as `generate`, at the call.
        """
        return generation.stream(self, prompts, max_new_tokens, **options)

    def logits(self, y: Tensor) -> Tensor:
        """[..., vocab_size] of the backbone's outputs y [..., D]."""
        return F.linear(y, self.embedding.weight)


def _pattern(mixer: MixerSpec | Sequence[MixerSpec]) -> list[MixerSpec]:
    pattern = [mixer] if isinstance(mixer, str | type | Mapping) else list(mixer)
    if not pattern:
        raise ValueError("Backbone: expected mixer to name at least one mixer, got an empty pattern.")
    return pattern


def _build(spec: MixerSpec, dim: int) -> TokenMixer:
    if not isinstance(spec, Mapping):
        return create_mixer(spec, dim)
    options = {key: value for key, value in spec.items() if key not in ("name", "dim")}
    if "name" not in spec or spec.get("dim", dim) != dim:
        raise ValueError(f"Backbone: expected a mixer of name and of width dim = {dim}, got {dict(spec)!r}.")
    return create_mixer(spec["name"], dim, **options)
