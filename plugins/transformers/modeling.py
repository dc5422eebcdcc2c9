"""A seqzoo.LanguageModel behind the interface of transformers."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import ModelOutput

from .cache import StateCache
from .configuration import SeqzooConfig

# its name changed between two versions
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
ALIGNMENT = 64  # bytes, of what torch allocates on a CPU


@dataclass
class SeqzooOutput(ModelOutput):
    """loss, logits [B, T, vocab_size], and the StateCache, by the name that the installed transformers uses."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: StateCache | None = None
    past_key_values: StateCache | None = None


def _align(model: nn.Module) -> None:
    """Put weights where torch itself would have put them.

    Those of a safetensors file are used where they lie in it, at any multiple of 4 bytes, and for a vector that does not start
    at a multiple of its registers' width BLAS takes another route, which rounds otherwise.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


class SeqzooPreTrainedModel(PreTrainedModel):
    config_class = SeqzooConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _is_stateful = True

    def __init__(self, config: SeqzooConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.is_built = False
        self.model = config.build()

    @classmethod
    def from_pretrained(cls, *args: Any, **named: Any) -> Any:
        """As of every model of transformers; computes the very bits that the saved model did."""
        loaded = super().from_pretrained(*args, **named)
        _align(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def finish(self) -> None:
        self.post_init()
        self.is_built = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Mixers start as they were published, which building them has done. What a checkpoint lacks comes from a new model."""
        own = dict(module.named_parameters(recurse=False))
        missing = [name for name, p in own.items() if not getattr(p, "_is_hf_initialized", False)]
        if not self.is_built or not missing:
            return
        place = next(name for name, other in self.named_modules() if other is module)
        fresh = dict(type(self)(self.config).get_submodule(place).named_parameters(recurse=False))  # type: ignore[arg-type]
        for name in missing:
            own[name].copy_(fresh[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """What the last block gives, [B, T, D], and the state."""
        backbone = self.model.backbone
        backbone.activation_checkpointing = self.gradient_checkpointing and self.training
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        return backbone(self.model.dropout(self.model.embedding(input_ids)), state, mask=mask)


class SeqzooForCausalLM(SeqzooPreTrainedModel, GenerationMixin):
    """A language model of any mixers, for `generate`, `Trainer` and whatever else takes a model of transformers.

    The state stays what it is for the mixers used: constant in size for recurrent ones, keys and values for attention; each new
    token is one step. Pads may stand anywhere in `attention_mask`.
    """

    def __init__(self, config: SeqzooConfig) -> None:
        super().__init__(config)
        self.finish()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # of keys and values alone

    def get_output_embeddings(self) -> None:
        """None: the embedding is the output layer too."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **named: Any,
    ) -> SeqzooOutput | tuple[Any, ...]:
        """Logits of the next token at every place.

        Args:
            input_ids: [B, T]; with a cache those that it has not read.
            attention_mask: [B, T] or, with a cache, [B, all so far]: 0 at pads.
            labels: [B, T], usually input_ids: each is compared with the logits one place before; -100 does not count.
            use_cache: return the cache, so that a call with later tokens goes on from it. It is changed then.
            logits_to_keep: only the last so many logits; 0 for all.
            return_dict: False for a tuple.

        Raises:
            ValueError: there are no input_ids.
        """
        if input_ids is None:
            raise ValueError("SeqzooForCausalLM: expected input_ids.")
        cache = named.pop(CACHE, None)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is None and use_cache and not self.training:
            cache = StateCache()
        columns = input_ids.shape[1]
        if cache is not None and cache.state is not None and columns == 1 and not torch.is_grad_enabled():
            logits = cache.step(self.model, input_ids[:, 0])[:, None]
            cache.length += 1
        else:
            y, state = self.hidden(input_ids, attention_mask, None if cache is None else cache.state)
            if cache is not None:
                cache.read(state, columns)
            logits = self.model.logits(y[:, -logits_to_keep:] if logits_to_keep else y)
        loss = None
        if labels is not None:
            kept = {k: v for k, v in named.items() if k == "num_items_in_batch"}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kept)
        output = SeqzooOutput(loss=loss, logits=logits, **({CACHE: cache} if cache is not None else {}))
        return output.to_tuple() if return_dict is False else output


class SeqzooForSequenceClassification(SeqzooPreTrainedModel):
    """A label for each sequence, from what the last block gives at its last token."""

    def __init__(self, config: SeqzooConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.dim, config.num_labels, bias=False)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **named: Any,
    ) -> SequenceClassifierOutput:
        """Logits [B, num_labels] of input_ids [B, T]; with labels [B] the loss too."""
        y, _ = self.hidden(input_ids, attention_mask)
        here = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (place * (here != 0)).argmax(1)
        logits = self.score(y[torch.arange(y.shape[0], device=y.device), last])
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
