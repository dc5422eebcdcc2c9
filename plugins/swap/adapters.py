"""Modules that are called as an attention module is, and mix with a mixer of the zoo."""

from typing import Any

import torch
from torch import Tensor, nn

from seqzoo import Bidirectional

# what x-transformers hands down about positions: a mixer knows the order without
POSITIONS = ("rel_pos", "rotary_pos_emb", "context_rotary_pos_emb", "polar_pos_emb", "pos", "attn_bias")


def is_x_transformers_attention(module: nn.Module) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("x_transformers.x_transformers", "Attention")
        for cls in type(module).__mro__
    )


class Adapter(nn.Module):
    """Holds the mixer and knows how the old module was called."""

    def __init__(self, mixer: Any, old: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.old_name = type(old).__name__

    @property
    def causal(self) -> bool:
        return not isinstance(self.mixer, Bidirectional)

    @property
    def config(self) -> dict[str, Any]:
        """Of the mixer."""
        return (self.mixer if self.causal else self.mixer.mixer).config

    def refuse(self, **given: Any) -> None:
        """ValueError for what the mixer can't take into account."""
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"{self.old_name}, swapped for {self.config['name']}: it can't take {name} into account; "
                    "leave it out, or leave this module as it was."
                )


class TokenAdapter(Adapter):
    """y = attention(x): of x [B, T, D] alone, as in nanoGPT."""

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """y [B, T, D]."""
        self.refuse(**{f"argument {place}": value for place, value in enumerate(others, start=2)}, **named)
        return self.mixer(x)[0]


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
        self.refuse(context=context, **{k: v for k, v in named.items() if k not in POSITIONS})
        if causal is not None and causal != self.causal:
            self.refuse(causal=causal or "False")
        y, _ = self.mixer(x, mask=mask)
        if not return_intermediates:
            return y
        from x_transformers.x_transformers import Intermediates

        return y, Intermediates()


class MultiheadAdapter(Adapter):
    """nn.MultiheadAttention of a sequence with itself. It returns no weights."""

    # torch's encoder layers read these, and then call forward instead of a fused kernel on weights that are not there
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, mixer: Any, old: nn.MultiheadAttention) -> None:
        super().__init__(mixer, old)
        self.batch_first, self.embed_dim, self.num_heads = old.batch_first, old.embed_dim, old.num_heads
        self.checked: set[int] = set()  # lengths whose mask has been seen to be causal

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
            pads = (
                key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == -torch.inf
            )
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
        elif attn_mask is not None and length not in self.checked:
            hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
            future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
            if not torch.equal(hidden, future.expand(hidden.shape)):
                self.refuse(attn_mask="other than the causal one")
            self.checked.add(length)
