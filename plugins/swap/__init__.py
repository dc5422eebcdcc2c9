"""Swap the attention of any torch model for a mixer of the zoo, in place.

swap = swap_mixers(model, to="hgrn2")        # nn.MultiheadAttention, x-transformers' Attention
swap = swap_mixers(model, CausalSelfAttention, to="gla", num_heads=4)
print(swap)                                  # what was replaced, what was not, and why
swap.undo()
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import seqzoo
from seqzoo import Bidirectional

from .adapters import (
    Adapter,
    MultiheadAdapter,
    TokenAdapter,
    XTransformersAdapter,
    is_x_transformers_attention,
)

Match = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[str, nn.Module], bool]
WIDTHS = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim")  # what modules call their width

__all__ = ["Swap", "swap_mixers"]


@dataclass
class Swap:
    """What `swap_mixers` did, or would do.

    replaced  [(name, class before, mixer)], `mixer` being the new one's configuration
    left      [(name, why)]: modules that match and could not be replaced
    """

    replaced: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    _before: list[tuple[nn.Module, str, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the old modules back, with the weights they had."""
        while self._before:
            parent, name, old = self._before.pop()
            setattr(parent, name, old)

    def __str__(self) -> str:
        lines = [f"replaced {name}: {before} -> {mixer['name']}" for name, before, mixer in self.replaced]
        return "\n".join(lines + [f"left {name}: {why}" for name, why in self.left])


def swap_mixers(
    model: nn.Module,
    match: Match | None = None,
    to: str | type[seqzoo.TokenMixer] = "hgrn2",
    *,
    causal: bool | None = None,
    dim: int | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Swap:
    """Replace attention modules by mixers, each behind an adapter that is called as the old module was.

    The new weights are untrained, on the old ones' device and in their dtype. A module that stands in several places is
    replaced by one mixer. Parameters change, so build the optimizer afterwards.

    Args:
        model: changed in place.
        match: which modules: a type or several, a pattern for their names such as "*.attn", or a function of name and module.
            By default `nn.MultiheadAttention` and x-transformers' `Attention`. Of an `nn.TransformerEncoderLayer` the
            `self_attn` is replaced.
        to: the mixer, as for `seqzoo.create_mixer`.
        causal: False reads in both directions, with shared weights (`seqzoo.Bidirectional`). By default what the module says
            in its attribute `causal`, else True.
        dim: the width D, where the module does not tell it.
        dry_run: only say what would be done.
        options: of the mixer.

    Returns:
        What was replaced and what was left, which prints as a list, and whose `undo()` takes it all back.

    Raises:
        ValueError: nothing matches, or the mixer's name or options are wrong. TypeError: an option has the wrong type.
    """
    swap = Swap()
    adapters: dict[nn.Module, Adapter | str] = {}
    found = list(_matching(model, match))
    if not found:
        kinds = Counter(type(module).__name__ for module in model.modules()).most_common(12)
        raise ValueError(
            f"swap_mixers: no module matches {match!r}. The model has "
            + ", ".join(f"{count} {kind}" for kind, count in kinds)
        )
    for name, parent, attribute, module in found:
        if module not in adapters:
            adapters[module] = _adapter(name, parent, module, to, causal, dim, options)
        adapter = adapters[module]
        if isinstance(adapter, str):
            swap.left.append((name, adapter))
            continue
        swap.replaced.append((name, type(module).__name__, adapter.config))
        if not dry_run:
            swap._before.append((parent, attribute, module))
            setattr(parent, attribute, adapter)
    if any(isinstance(adapter, XTransformersAdapter) for adapter in adapters.values()) and not dry_run:
        for (
            module
        ) in model.modules():  # x-transformers' models, which ask this before they keep keys and values
            if getattr(module, "can_cache_kv", False) is True:
                swap._before.append((module, "can_cache_kv", True))
                module.can_cache_kv = False  # type: ignore[assignment]
    return swap


def _matching(model: nn.Module, match: Match | None) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """Name, parent, attribute and module of each match; nothing inside of one."""
    taken: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{outer}.") for outer in taken) or not _matches(match, name, module):
            continue
        taken.append(name)
        if isinstance(module, nn.TransformerEncoderLayer):
            yield f"{name}.self_attn".lstrip("."), module, "self_attn", module.self_attn
            continue
        parent, _, attribute = name.rpartition(".")
        yield name, model.get_submodule(parent) if name else None, attribute, module


def _matches(match: Match | None, name: str, module: nn.Module) -> bool:
    if match is None:
        return isinstance(module, nn.MultiheadAttention) or is_x_transformers_attention(module)
    if isinstance(match, str):
        return fnmatch.fnmatchcase(name, match)
    return isinstance(module, match) if isinstance(match, (type, tuple)) else bool(match(name, module))


def _adapter(
    name: str,
    parent: nn.Module | None,
    module: nn.Module,
    to: Any,
    causal: bool | None,
    dim: int | None,
    options: dict[str, Any],
) -> Adapter | str:
    """What to put in the module's place, or why it can't be replaced."""
    if parent is None:
        return "it is the model itself: put it into another module first"
    if isinstance(parent, nn.TransformerDecoderLayer) and module is parent.multihead_attn:
        return "it is cross-attention, which looks at another sequence than its own"
    if isinstance(module, nn.MultiheadAttention) and not module._qkv_same_embed_dim:
        return f"its keys and values have other widths, {module.kdim} and {module.vdim}, than its queries, {module.embed_dim}"
    weights = next(module.parameters(), None)
    width = dim or _width(module)
    if width is None:
        return f"it does not tell its width (in {', '.join(WIDTHS)}, or a first Linear): give dim"
    mixer: Any = seqzoo.create_mixer(to, width, **options)
    causal = getattr(module, "causal", True) if causal is None else causal
    if not causal:
        mixer = Bidirectional(mixer)
    if weights is not None:
        mixer = mixer.to(weights.device, weights.dtype)
    kind: type[Adapter] = TokenAdapter
    if isinstance(module, nn.MultiheadAttention):
        kind = MultiheadAdapter
    elif is_x_transformers_attention(module):
        kind = XTransformersAdapter
    return kind(mixer, module).train(module.training)


def _width(module: nn.Module) -> int | None:
    told = (getattr(module, name, None) for name in WIDTHS)
    first = next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), None)
    return next((width for width in told if isinstance(width, int)), first)
