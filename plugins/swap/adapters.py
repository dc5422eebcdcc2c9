"""Modules that are called as an attention module is, and mix with a mixer of the zoo."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqzoo import Bidirectional

from .masks import hidden_by, hides_the_future
from .signatures import UNREAD, Signature

# what tells positions: a mixer knows the order without
POSITIONS = {
    "position_embeddings", "position_ids", "positions", "cache_position", "pos_emb", "rotary_emb", "rotary_pos_emb", "rope",
    "freqs", "freqs_cis", "cos", "sin", "cos_sin", "position_bias", "relative_pos", "relative_position_bias", "rel_embeddings",
    "alibi",
}  # fmt: skip
X_POSITIONS = {*POSITIONS, "rel_pos", "context_rotary_pos_emb", "polar_pos_emb", "pos", "attn_bias"}
MASKS = {"mask", "attn_mask", "attention_mask", "causal_mask"}
SAME = {"key", "value", "keys", "values", "k", "v"}  # x again, where one sequence is mixed with itself


def is_x_transformers_attention(module: nn.Module) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("x_transformers.x_transformers", "Attention")
        for cls in type(module).__mro__
    )


class Adapter(nn.Module):
    """Holds the mixer and knows how the old module was called.

    Class attributes:
        takes: arguments that it understands.
    """

    takes: frozenset[str] = frozenset()

    def __init__(self, mixer: Any, old: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.old_name = type(old).__name__
        self.signature = Signature.of(old)

    @classmethod
    def why_not(cls, old: nn.Module) -> str | None:
        """Why it can't be called as `old` is, if so."""
        signature = Signature.of(old)
        if not signature.names:
            return "its forward takes no tensor by place"
        if unknown := [name for name in signature.required if name not in cls.takes]:
            return f"its forward needs {' and '.join(unknown)}, which a mixer can't take into account"
        others = signature.others()
        if UNREAD in others:
            return "what its forward returns can't be told from its source"
        if others:
            return f"its forward also returns {' and '.join(others)}, which a mixer does not have"
        return None

    @property
    def causal(self) -> bool:
        return not isinstance(self.mixer, Bidirectional)

    @property
    def config(self) -> dict[str, Any]:
        """Of the mixer."""
        return (self.mixer if self.causal else self.mixer.mixer).config

    def arguments(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by their names in the old forward."""
        if len(given) > len(self.signature.names):
            raise TypeError(
                f"{self.old_name}, swapped for {self.config['name']}: expected at most {len(self.signature.names)} arguments "
                f"without a name, got {len(given)}."
            )
        return {**dict(zip(self.signature.names, given, strict=False)), **named}

    def result(self, y: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """y as the old forward returned it, None for its weights."""
        returns = self.signature.returns
        return y if returns is None else (y, *[None] * (len(returns) - 1))

    def refuse(self, **given: Any) -> None:
        """ValueError for what the mixer can't take into account."""
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"{self.old_name}, swapped for {self.config['name']}: it can't take {name} into account; "
                    "leave it out, or leave this module as it was."
                )

    def check(self, right: Tensor, otherwise: str) -> None:
        """`refuse` unless `right`; in compiled code an assertion, which does not break the graph."""
        if torch.compiler.is_compiling():
            torch._assert_async(right, f"{self.old_name}, swapped: it can't take {otherwise} into account")
        else:
            self.refuse(**{otherwise: not bool(right)})

    def check_is_causal(self, is_causal: bool | None) -> None:
        if is_causal is not None and is_causal != self.causal:
            self.refuse(is_causal=str(is_causal))


class TokenAdapter(Adapter):
    """y = attention(x), as in nanoGPT: of x [B, T, D] alone, perhaps with positions, or with the causal mask."""

    takes = frozenset(POSITIONS | MASKS | SAME | {"is_causal"})

    def forward(self, *given: Any, **named: Any) -> Any:
        """y [B, T, D], in the tuple that the old module returned if it did."""
        call = self.arguments(given, named)
        x = call.pop(self.signature.names[0])
        self.check_is_causal(call.pop("is_causal", None))
        for name, value in call.items():
            if name in SAME and value is x:
                continue
            if name in MASKS and self.causal and isinstance(value, Tensor):
                if not any(hides_the_future(value, way, x.shape[1]) for way in (True, False)):
                    self.refuse(**{f"{name} other than the causal one": value})
            elif name not in POSITIONS:
                self.refuse(**{name: value})
        return self.result(self.mixer(x)[0])


class XTransformersAdapter(Adapter):
    """Attention of x-transformers."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        return_intermediates: bool = False,
        causal: bool | None = None,
        **named: Any,
    ) -> Any:
        """y [B, T, D], with empty intermediates if they are asked for. What tells positions is not needed."""
        if named.get("cache") is not None:
            raise ValueError("a swapped model has no key/value cache: generate with cache_kv=False.")
        self.refuse(context=context, **{k: v for k, v in named.items() if k not in X_POSITIONS})
        self.check_is_causal(causal)
        y, _ = self.mixer(x, mask=mask)
        if not return_intermediates:
            return y
        from x_transformers.x_transformers import Intermediates

        return y, Intermediates()


class MultiheadAdapter(Adapter):
    """nn.MultiheadAttention of a sequence with itself. It returns no weights."""

    takes = frozenset({"key", "value"})
    # torch's encoder layers read these, and then call forward instead of a fused kernel on weights that are not there
    _qkv_same_embed_dim = False
    in_proj_bias = None

    @classmethod
    def why_not(cls, old: nn.Module) -> str | None:
        returns = Signature.of(old).returns
        if returns is None or len(returns) != 2:
            return "its forward does not return a pair, as that of nn.MultiheadAttention does"
        return super().why_not(old)

    def __init__(self, mixer: Any, old: nn.MultiheadAttention) -> None:
        super().__init__(mixer, old)
        self.batch_first, self.embed_dim, self.num_heads = old.batch_first, old.embed_dim, old.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(y, None), of the shape of query; pads give 0.

        Raises:
            ValueError: key or value is another tensor than query, or the mask says another direction than the mixer reads in.
        """
        if key is not query or value is not query:
            raise ValueError(
                f"MultiheadAttention, swapped for {self.config['name']}: it mixes one sequence with itself, but key or value "
                "is another tensor than query (cross-attention?)."
            )
        alone = query.dim() == 2
        x = query[None] if alone else query if self.batch_first else query.transpose(0, 1)
        self._check_direction(attn_mask, is_causal, x.shape[1])
        mask = None
        if key_padding_mask is not None:
            pads, nothing_else = hidden_by(key_padding_mask, true_hides=True)
            self.check(nothing_else, "a key_padding_mask of other numbers than 0 and -inf")
            mask = ~(pads[None] if alone else pads)
        y, _ = self.mixer(x, mask=mask)
        return y[0] if alone else y if self.batch_first else y.transpose(0, 1), None

    def _check_direction(self, attn_mask: Tensor | None, is_causal: bool, length: int) -> None:
        if not self.causal:
            self.refuse(attn_mask=attn_mask, is_causal=is_causal)
        elif attn_mask is None and not is_causal:
            raise ValueError(
                f"MultiheadAttention, swapped for {self.config['name']}: it was called without a causal mask, and this mixer "
                "reads causally. Pass the mask, or swap with causal=False."
            )
        elif attn_mask is not None and not is_causal:  # else it is the caller's word, as it is torch's own
            right = hides_the_future(attn_mask, True, length)
            self.refuse(attn_mask=None if right else "other than the causal one")
