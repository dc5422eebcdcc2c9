"""A seqzoo.LanguageModel behind the interface of transformers."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from seqzoo.errors import closest

from ..packs import document_starts
from .cache import StateCache
from .configuration import SeqzooConfig

# its name changed between two versions
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# what transformers may hand down that changes nothing here
HARMLESS = {"token_type_ids", "cache_position", "num_items_in_batch", "return_dict"}
# what a collator that puts documents into a row says again beside position_ids
AGAIN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
ALIGNMENT = 64  # bytes, of what torch allocates on a CPU


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
        self, x: Tensor, attention_mask: Tensor | None, positions: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """What the last block gives of embeddings x [B, T, D], and the state, which documents in a row don't have."""
        backbone = self.model.backbone
        backbone.activation_checkpointing = self.gradient_checkpointing and self.training
        x = self.model.dropout(x)
        if attention_mask is not None:
            return backbone(x, state, mask=attention_mask[:, -x.shape[1] :].bool())
        if positions is None or state is not None:
            return backbone(x, state)
        starts = document_starts(positions.expand(x.shape[:2]))
        if starts.shape[0] == x.shape[0] + 1:  # one a row
            return backbone(x)
        y, _ = backbone(x.reshape(1, -1, x.shape[-1]), cu_seqlens=starts, max_seqlen=x.shape[1])
        return y.view_as(x), None

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """[B, T, D]. ValueError unless there is one of the two."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{type(self).__name__}: expected input_ids or inputs_embeds, and not both.")
        return self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds

    def refuse(self, named: Mapping[str, Any]) -> None:
        """ValueError or TypeError for an argument that would be left out of account."""
        for name, value in named.items():
            if name in HARMLESS or value is None or value is False:
                continue
            if name in ("output_hidden_states", "output_attentions"):
                raise ValueError(f"{type(self).__name__}: expected no {name}, which it does not collect.")
            known = list(inspect.signature(self.forward).parameters)
            raise TypeError(
                f"{type(self).__name__}: unexpected keyword argument {name!r}{closest(name, known)}"
            )


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
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **named: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token at every place.

        Args:
            input_ids: [B, T]; with a cache those that it has not read.
            attention_mask: [B, T] or, with a cache, [B, all so far]: 0 at pads.
            labels: [B, T], usually input_ids: each is compared with the logits one place before; -100 does not count.
            use_cache: return the cache, so that a call with later tokens goes on from it. It is changed then.
            logits_to_keep: only the last so many logits; 0 for all.
            return_dict: False for a tuple.
            position_ids: [B, T]; without a mask and a cache a 0 starts a new document in its row, which knows nothing of what
                is before. The order is known without.
            inputs_embeds: [B, T, D], instead of input_ids.
            named: the cache, as `cache` or `past_key_values`; others are an error.

        Raises:
            ValueError, TypeError: not one of input_ids and inputs_embeds; an argument would be left out of account.
        """
        given = [named.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((each for each in given if each is not None), None)
        for name in AGAIN if position_ids is not None else ():
            named.pop(name, None)
        self.refuse(named)
        if cache is not None and not isinstance(cache, StateCache):
            raise TypeError(f"SeqzooForCausalLM: expected a StateCache, got {type(cache).__name__}.")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is not None:
            position_ids = None  # one text, which goes on
        elif use_cache and not self.training:
            cache = StateCache()
        if self._is_step(input_ids, attention_mask, cache):
            logits = cache.step(self.model, input_ids[:, 0])[:, None]  # type: ignore[union-attr, index]
            cache.length += 1  # type: ignore[union-attr]
        else:
            x = self.embed(input_ids, inputs_embeds)
            y, state = self.hidden(x, attention_mask, position_ids, None if cache is None else cache.state)
            if state is None:
                cache = None  # of several documents in a row there is nothing to go on from
            elif cache is not None:
                cache.read(state, x.shape[1])
            logits = self.model.logits(y[:, -logits_to_keep:] if logits_to_keep else y)
        loss = None
        if labels is not None:
            kept = {k: v for k, v in named.items() if k == "num_items_in_batch"}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kept)
        named = {} if cache is None else {CACHE: cache}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **named)
        return output.to_tuple() if return_dict is False else output

    @staticmethod
    def _is_step(input_ids: Tensor | None, attention_mask: Tensor | None, cache: StateCache | None) -> bool:
        """Whether the cache can be written in place: one token in each row, and no gradient."""
        if cache is None or cache.state is None or torch.is_grad_enabled():
            return False
        one = input_ids is not None and input_ids.shape[1] == 1
        return one and (attention_mask is None or bool(attention_mask[:, -1].all()))


class SeqzooForSequenceClassification(SeqzooPreTrainedModel):
    """A label for each sequence, from what the last block gives at its last token."""

    def __init__(self, config: SeqzooConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.dim, config.num_labels, bias=False)
        self.finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **named: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits [B, num_labels] of input_ids [B, T], or of inputs_embeds [B, T, D].

        With labels the loss too: of classes [B], of several at once [B, num_labels], or of numbers [B] where num_labels is 1;
        `config.problem_type` may say which.
        """
        self.refuse(named)
        x = self.embed(input_ids, inputs_embeds)
        y, _ = self.hidden(x, attention_mask)
        here = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask
        place = torch.arange(x.shape[1], device=x.device)
        last = (place * (here != 0)).argmax(1)
        logits = self.score(y[torch.arange(y.shape[0], device=y.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, logits=logits, pooled_logits=logits.float(), config=self.config
            )
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output
