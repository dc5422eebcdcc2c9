"""Attention as transformers calls it: hidden_states, a mask that may hold pads, a cache."""

from typing import Any

from torch import Tensor, nn

from .adapters import POSITIONS, Adapter
from .masks import tokens_of
from .signatures import parameters

FIRST = ("hidden_states", "hidden_state")
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
HARMLESS = {"use_cache", "output_hidden_states", "return_dict", "num_items_in_batch", "output_router_logits"}


def is_called_as_in_transformers(module: nn.Module) -> bool:
    """Whether its forward begins with hidden_states, as attention of transformers does, and models of its kind."""
    return any(parameter.name in FIRST for parameter in parameters(module)[:1])


def is_transformers_attention(module: nn.Module) -> bool:
    """Whether it is a class ...Attention of transformers, with no other one inside."""
    cls = type(module)
    return (
        cls.__module__.startswith("transformers.models.")
        and cls.__name__.endswith("Attention")
        and is_called_as_in_transformers(module)
        and inner_attention(module) is None
    )


def inner_attention(module: nn.Module) -> str | None:
    """The name of an attention module inside of this one, which then does more: its residual, perhaps, and its norm."""
    for name, inner in module.named_modules():
        if name and type(inner).__name__.endswith("Attention") and is_called_as_in_transformers(inner):
            return f"{name} ({type(inner).__name__})"
    return None


class HiddenStatesAdapter(Adapter):
    """Attention of transformers' models, Llama's or GPT-2's or BERT's, of a sequence with itself.

    Pads give 0. The state stands in the model's cache, where the layer's keys and values did, so that `generate` goes on from
    it. A window that the old attention had is not kept.
    """

    takes = frozenset({*POSITIONS, *CACHES, *HARMLESS, "attention_mask", "is_causal", "output_attentions"})

    def __init__(self, mixer: Any, old: nn.Module) -> None:
        super().__init__(mixer, old)
        in_gpt_neo = getattr(old, "layer_id", None)
        self.layer_idx: int | None = getattr(old, "layer_idx", in_gpt_neo)
        told = [getattr(place, "sliding_window", None) for place in (old, getattr(old, "config", None))]
        self.window = next((window for window in told if isinstance(window, int)), None)

    def forward(self, *given: Any, **named: Any) -> Any:
        """y [B, T, D] in the tuple that the old module returned, None for its weights.

        Raises:
            ValueError: a mask hides more than pads and the future, or something else can't be taken into account.
        """
        call = self.arguments(given, named)
        x = call.pop(self.signature.names[0])
        mask = call.pop("attention_mask", None)
        self.check_is_causal(call.pop("is_causal", None))
        cache = next((call[name] for name in CACHES if call.get(name) is not None), None)
        if cache is not None and not self.causal:
            self.refuse(cache=cache)
        self.refuse(**{k: v for k, v in call.items() if k not in POSITIONS | HARMLESS | set(CACHES)})
        if cache is None:
            return self.result(self.mixer(x, mask=self.tokens(mask, x, 0))[0])
        from .state_layer import StateLayer  # transformers is here: the cache is its own

        layer = StateLayer.of(cache, self.layer_idx)
        y, state = self.mixer(x, layer.state, mask=self.tokens(mask, x, layer.length))
        layer.read(state, x.shape[1])
        return self.result(y)

    def tokens(self, mask: Any, x: Tensor, past: int) -> Tensor | None:
        """The mixer's mask [B, T]; None without one."""
        if mask is None:
            return None
        found = tokens_of(mask, x, past, self.causal, self.window) if isinstance(mask, Tensor) else None
        what = f"an attention_mask that hides more than pads{' and the future' if self.causal else ''}"
        if found is None:
            self.refuse(**{what: True})
            return None
        self.check(found[1], what)
        return found[0]
