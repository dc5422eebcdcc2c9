"""A seqzoo.LanguageModel as a model of torchtitan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.protocols.model import BaseModel

import seqzoo

WRAPPER = "_checkpoint_wrapped_module."  # what activation checkpointing puts into names
DEGREES = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


class SeqzooModel(BaseModel):
    """A language model of any mixers, sharded by FSDP2 in torchtitan's trainer.

    `model` is the seqzoo.LanguageModel itself, so weights, config and results are its own. Parameters stay in float32, and
    `training.mixed_precision_param` is the dtype of the products, by autocast: a decay near 1 would not survive being rounded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The arguments of `seqzoo.LanguageModel`."""

        vocab_size: int = 256
        dim: int = 256
        depth: int = 4
        mixer: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "hgrn2"
        ffn_dim: int | None = None
        dropout: float = 0.0
        lower_bound: str | None = "lm"
        norm_eps: float = 1e-6

        def language_model(self) -> seqzoo.LanguageModel:
            """The model, untrained. ValueError, TypeError: as `seqzoo.LanguageModel`."""
            names = ("vocab_size", "dim", "depth", "mixer", "ffn_dim", "dropout", "lower_bound", "norm_eps")
            return seqzoo.LanguageModel(**{name: getattr(self, name) for name in names})

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """ValueError for what a model of mixers can't do in torchtitan."""
            parallelism = config.parallelism
            for name in DEGREES:
                if getattr(parallelism, name) > 1:
                    raise ValueError(
                        f"SeqzooModel: expected parallelism.{name} to be 1, got {getattr(parallelism, name)}: models of "
                        "mixers are sharded and replicated over the data, by data_parallel_shard_degree and "
                        "data_parallel_replicate_degree."
                    )
            if parallelism.spmd_backend != "partial_dtensor":
                raise ValueError(
                    "SeqzooModel: expected parallelism.spmd_backend to be 'partial_dtensor', got "
                    f"{parallelism.spmd_backend!r}."
                )
            if isinstance(config.loss, ChunkedLossWrapper.Config):
                raise ValueError("SeqzooModel: expected loss CrossEntropyLoss, got ChunkedLossWrapper.")

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and the operations of a token in a training step: six a parameter, mixing itself left out."""
            parameters = sum(p.numel() for p in model.parameters())
            return parameters, 6 * parameters

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = config.language_model()
        self.autocast: torch.dtype | None = None  # set by `parallelize`

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, where torchtitan looks for them."""
        return self.model.backbone.blocks

    def verify_module_protocol(self) -> None:
        """Nothing: a mixer is a module of torch, and `init_states` needs no more of it."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Every parameter as its mixer was published: from a model built anew, of which a shard takes its part."""
        fresh = self.config.language_model().state_dict()
        for name, mine in self.model.state_dict(keep_vars=True).items():
            value = fresh[name.replace(WRAPPER, "")]
            if isinstance(mine, DTensor):
                mesh = mine.device_mesh
                whole = value.to(mesh.device_type, mine.dtype)
                mine.to_local().copy_(distribute_tensor(whole, mesh, mine.placements).to_local())
            else:
                mine.copy_(value)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attention_masks: None = None
    ) -> Tensor:
        """Logits [B, T, vocab_size] of tokens [B, T]. Where positions [B, T] are 0 a document starts, and states anew."""
        with torch.autocast(tokens.device.type, self.autocast, enabled=self.autocast is not None):
            if positions is None:
                return self.model(tokens)[0]
            first = torch.arange(tokens.shape[1], device=tokens.device) == 0
            starts = ((positions == 0) | first).flatten().nonzero().flatten()
            ends = F.pad(starts, (0, 1), value=tokens.numel())
            logits, _ = self.model(tokens.reshape(1, -1), cu_seqlens=ends, max_seqlen=tokens.shape[1])
            return logits.view(*tokens.shape, -1)


def load_model(folder: str | Path, config: SeqzooModel.Config) -> seqzoo.LanguageModel:
    """The trained model of a checkpoint, such as outputs/checkpoint/step-1000, in one process however many wrote it."""
    model = SeqzooModel(config)
    state = model.state_dict()
    load(state, checkpoint_id=str(folder))
    model.load_state_dict(state)
    return model.model.eval()
