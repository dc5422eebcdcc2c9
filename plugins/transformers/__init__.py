"""seqzoo's models as models of transformers: Auto classes, generate, Trainer, save_pretrained.

import seqzoo_plugins.transformers               # tells the Auto classes
model = AutoModelForCausalLM.from_config(SeqzooConfig(vocab_size=256, mixer=["hgrn2", "attention"]))
"""

from ..required import require

require("transformers", "5.22", below="6", extra="transformers")

import transformers

from .cache import StateCache
from .configuration import SeqzooConfig
from .modeling import SeqzooForCausalLM, SeqzooForSequenceClassification, SeqzooOutput

__all__ = [
    "SeqzooConfig",
    "SeqzooForCausalLM",
    "SeqzooForSequenceClassification",
    "SeqzooOutput",
    "StateCache",
]

transformers.AutoConfig.register(SeqzooConfig.model_type, SeqzooConfig)
transformers.AutoModelForCausalLM.register(SeqzooConfig, SeqzooForCausalLM)
transformers.AutoModelForSequenceClassification.register(SeqzooConfig, SeqzooForSequenceClassification)
