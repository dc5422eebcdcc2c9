"""What a model of transformers keeps in its config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from seqzoo import LanguageModel

Config: Any = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig
MixerSpec = str | Mapping[str, Any]


class SeqzooConfig(Config):
    """The configuration of a seqzoo.LanguageModel.

    Args:
        vocab_size: number of tokens.
        dim: width D; also `hidden_size`.
        depth: number of blocks; also `num_hidden_layers`.
        mixer: a registered name, a configuration {"name": ..., option: ...}, or a list of these that repeats over the depth.
        ffn_dim: inner width of the feed-forward layers; by default 8/3 D.
        dropout: of each branch.
        lower_bound: form of the hierarchical lower bound, for the mixers that read one.
        norm_eps: of the norms.
        use_cache: whether a call returns its state, outside of training.
        others: as of every configuration of transformers.
    """

    model_type = "seqzoo"
    attribute_map = {"hidden_size": "dim", "num_hidden_layers": "depth"}

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 4,
        mixer: MixerSpec | Sequence[MixerSpec] = "hgrn2",
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        lower_bound: str | None = "lm",
        norm_eps: float = 1e-6,
        use_cache: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size, self.dim, self.depth = vocab_size, dim, depth
        self.mixer = mixer if isinstance(mixer, (str, Mapping)) else list(mixer)
        self.ffn_dim, self.dropout = ffn_dim, dropout
        self.lower_bound, self.norm_eps, self.use_cache = lower_bound, norm_eps, use_cache
        others.setdefault("tie_word_embeddings", False)  # one matrix is both, so there is nothing to tie
        super().__init__(**others)

    def build(self) -> LanguageModel:
        """The model, untrained. Its mixers are registered names: nothing is imported on a file's word.

        Raises:
            ValueError, TypeError: a mixer is not registered or an option is wrong.
        """
        pattern = [self.mixer] if isinstance(self.mixer, (str, Mapping)) else self.mixer
        named = [{"name": spec} if isinstance(spec, str) else dict(spec) for spec in pattern]
        every = [{"dim": self.dim, **named[i % len(named)]} for i in range(self.depth if named else 0)]
        settings = {name: getattr(self, name) for name in ("ffn_dim", "dropout", "lower_bound", "norm_eps")}
        return LanguageModel.from_config(
            {"vocab_size": self.vocab_size, "dim": self.dim, "depth": self.depth, "mixer": every, **settings}
        )
