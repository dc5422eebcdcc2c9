"""Few recurrences, many mixers: the ops that seqzoo's mixers are parametrisations of.

Shape letters: B batch, T time, D channels, H heads, G key/value heads, K key width, V value width, N sequences in a pack,
S cache slots, W window or taps.
"""

from .attention import AttentionState, DecayAttentionState, attention
from .causal_conv1d import causal_conv1d
from .dispatch import use_backend
from .gated_linear_attention import gated_linear_attention
from .linear_scan import linear_scan

__all__ = [
    "AttentionState",
    "DecayAttentionState",
    "attention",
    "causal_conv1d",
    "gated_linear_attention",
    "linear_scan",
    "use_backend",
]
