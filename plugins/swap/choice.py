"""Which adapter takes a module's place, or why none can."""

import re
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
from .hidden_states import HiddenStatesAdapter, inner_attention, is_called_as_in_transformers
from .signatures import parameters

WIDTHS = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim")  # what modules call their width
# what they call attention to another sequence
CROSS = re.compile(r"cross|encoder_attn|encdec|src_attn", re.IGNORECASE)
CROSS_ATTENTION = "it is cross-attention, which looks at another sequence than its own"


def cross_attention(model: nn.Module) -> set[nn.Module]:
    """Where torch's decoders and x-transformers' layers look at another sequence."""
    found: set[Any] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerDecoderLayer):
            found.add(module.multihead_attn)
        elif isinstance(kinds := getattr(module, "layer_types", None), tuple):
            layers = getattr(module, "layers", ())
            found |= {layer[1] for kind, layer in zip(kinds, layers, strict=False) if kind == "c"}
        elif getattr(module, "is_cross_attention", False) is True:
            found.add(module)
    return found


def _kind(module: nn.Module) -> type[Adapter]:
    if isinstance(module, nn.MultiheadAttention):
        return MultiheadAdapter
    if is_x_transformers_attention(module):
        return XTransformersAdapter
    return HiddenStatesAdapter if is_called_as_in_transformers(module) else TokenAdapter


def _why_not(
    module: nn.Module, name: str, parent: nn.Module | None, is_cross: bool, causal: bool | None
) -> str | None:
    """Why a module can't be replaced, if so."""
    if is_cross:
        return CROSS_ATTENTION
    if parent is None:
        return "it is the model itself: put it into another module first"
    if isinstance(module, nn.MultiheadAttention) and not module._qkv_same_embed_dim:
        return f"its keys and values have other widths, {module.kdim} and {module.vdim}, than its queries, {module.embed_dim}"
    if CROSS.search(name) and len(parameters(module)) > 1:
        return CROSS_ATTENTION
    kind = _kind(module)
    if kind is HiddenStatesAdapter and (inner := inner_attention(module)):
        return f"it does more than attention, which is in its {inner}: match that"
    if why := kind.why_not(module):
        return why
    if kind is HiddenStatesAdapter and causal is None and _causal(module) is None:
        return "it does not tell whether it sees the future: give causal"
    return None


def _causal(module: nn.Module) -> bool | None:
    told = (getattr(module, name, None) for name in ("causal", "is_causal"))
    return next((value for value in told if isinstance(value, bool)), None)


def adapter_for(
    module: nn.Module,
    name: str,
    parent: nn.Module | None,
    is_cross: bool,
    to: Any,
    causal: bool | None,
    dim: int | None,
    options: dict[str, Any],
) -> Adapter | str:
    """What to put in the module's place, or why it can't be replaced; arguments as `swap_mixers`."""
    if why := _why_not(module, name, parent, is_cross, causal):
        return why
    width = dim or _width(module)
    if width is None:
        return f"it does not tell its width (in {', '.join(WIDTHS)}, or a first Linear): give dim"
    mixer: Any = seqzoo.create_mixer(to, width, **options)
    if (_causal(module) if causal is None else causal) is False:
        mixer = Bidirectional(mixer)
    weights = next(module.parameters(), None)
    if weights is not None:
        mixer = mixer.to(weights.device, weights.dtype)
    return _kind(module)(mixer, module).train(module.training)


def _width(module: nn.Module) -> int | None:
    first = next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), None)
    config = getattr(module, "config", None)  # last: it may be of a whole model of several widths
    told = [getattr(module, name, None) for name in WIDTHS]
    told += [first, *(getattr(config, name, None) for name in WIDTHS)]
    return next((width for width in told if isinstance(width, int)), None)
