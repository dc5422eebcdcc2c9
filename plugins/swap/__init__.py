"""Swap the attention of any torch model for a mixer of the zoo, in place.

swap = swap_mixers(model, to="hgrn2")        # nn.MultiheadAttention, attention of transformers and x-transformers
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

from .adapters import Adapter, MultiheadAdapter, XTransformersAdapter, is_x_transformers_attention
from .choice import adapter_for, cross_attention
from .hidden_states import is_transformers_attention

Match = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[str, nn.Module], bool]

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
            By default `nn.MultiheadAttention`, x-transformers' `Attention`, and whatever class of transformers is called
            ...Attention. Of an `nn.TransformerEncoderLayer` the `self_attn` is replaced.
        to: the mixer, as for `seqzoo.create_mixer`.
        causal: False reads in both directions, with shared weights (`seqzoo.Bidirectional`). By default what the module says
            in its attribute `causal` or `is_causal`, else True; one of transformers that does not say is left.
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
    cross = cross_attention(model)
    for name, parent, _, module in found:  # all before anything is changed: an option may be wrong
        if module not in adapters:
            adapters[module] = adapter_for(module, name, parent, module in cross, to, causal, dim, options)
    for name, parent, attribute, module in found:
        adapter = adapters[module]
        if isinstance(adapter, str):
            swap.left.append((name, adapter))
            continue
        swap.replaced.append((name, type(module).__name__, adapter.config))
        if not dry_run:
            swap._before.append((parent, attribute, module))
            setattr(parent, attribute, adapter)
    if not dry_run:
        _tell(model, swap)
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


def _tell(model: nn.Module, swap: Swap) -> None:
    """Tell modules around an adapter what they can't hand it: a cache (x-transformers), nested tensors (torch's encoders)."""
    flags = {XTransformersAdapter: "can_cache_kv", MultiheadAdapter: "use_nested_tensor"}
    for module in model.modules():
        for kind, flag in flags.items():
            if getattr(module, flag, False) is True and any(isinstance(m, kind) for m in module.modules()):
                swap._before.append((module, flag, True))
                setattr(module, flag, False)


def _matches(match: Match | None, name: str, module: nn.Module) -> bool:
    if match is None:
        known = isinstance(module, nn.MultiheadAttention) or is_x_transformers_attention(module)
        return known or is_transformers_attention(module)
    if isinstance(match, str):
        return fnmatch.fnmatchcase(name, match)
    return isinstance(module, match) if isinstance(match, (type, tuple)) else bool(match(name, module))
