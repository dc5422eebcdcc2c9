"""seqzoo: token mixers that you swap by name."""

from . import mixers, states
from .bounds import LowerBounds
from .directions import Bidirectional, Scan2d
from .mixer import ParamRule, TokenMixer
from .model import Backbone, Block, LanguageModel
from .optim import param_groups
from .packing import Pack
from .registry import MixerInfo, create_mixer, list_mixers, mixer_from_config, mixer_info, register_mixer

__version__ = "0.1.0.dev0"
__all__ = [
    "Backbone",
    "Bidirectional",
    "Block",
    "LanguageModel",
    "LowerBounds",
    "MixerInfo",
    "Pack",
    "ParamRule",
    "Scan2d",
    "TokenMixer",
    "create_mixer",
    "list_mixers",
    "mixer_from_config",
    "mixer_info",
    "mixers",
    "param_groups",
    "register_mixer",
    "states",
]
