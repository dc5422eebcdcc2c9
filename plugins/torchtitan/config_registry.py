"""Configurations by name: `--config` is a mixer, or a pattern such as hgrn2+attention."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

import seqzoo

from .data import ByteLoader, ByteTokenizer
from .model import WRAPPER, SeqzooModel
from .parallelize import parallelize


def configuration(
    mixer: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "hgrn2",
    *,
    lr: float = 4e-3,
    weight_decay: float = 0.1,
    **model: Any,
) -> Trainer.Config:
    """All that torchtitan's trainer asks for, to train a model of bytes; change the parts that you want otherwise.

    Args:
        mixer: as `seqzoo.LanguageModel`.
        lr: the highest learning rate.
        weight_decay: of the parameters that decay.
        model: other arguments of `seqzoo.LanguageModel`.

    Raises:
        ValueError, TypeError: as `seqzoo.LanguageModel`.
    """
    config = SeqzooModel.Config(mixer=mixer, **model)
    return Trainer.Config(
        model_spec=model_spec(config),
        loss=CrossEntropyLoss.Config(),
        tokenizer=ByteTokenizer.Config(),
        dataloader=ByteLoader.Config(),
        optimizer=optimizer(config, lr, weight_decay),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=100, decay_type="cosine", min_lr_factor=0.1),
        # CUDA graphs want a state of fixed addresses, which no one has tried here
        training=TrainingConfig(local_batch_size=8, seq_len=512, steps=1000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(enable=True, interval=100, last_save_model_only=False),
        activation_checkpoint=None,
    )


def model_spec(config: SeqzooModel.Config) -> ModelSpec:
    """What torchtitan calls a model: the configuration and the functions that go with it."""
    pattern = [config.mixer] if isinstance(config.mixer, (str, Mapping)) else config.mixer
    names = [spec if isinstance(spec, str) else spec["name"] for spec in pattern]
    return ModelSpec(
        name="seqzoo",
        flavor="+".join(names),
        model=config,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def optimizer(config: SeqzooModel.Config, lr: float, weight_decay: float) -> OptimizersContainer.Config:
    """AdamW whose groups are those of `seqzoo.param_groups`."""
    with torch.device("meta"):
        model = config.language_model()
    names = {parameter: f"model.{name}" for name, parameter in model.named_parameters()}
    groups = []
    for group in seqzoo.param_groups(model, lr=lr, weight_decay=weight_decay):
        own = "|".join(re.escape(names[parameter]) for parameter in group["params"])
        kwargs = {"lr": group["lr"], "weight_decay": group["weight_decay"], "betas": (0.9, 0.95)}
        # a block's number is followed by the wrapper's name under activation checkpointing
        pattern = "^(?:" + re.sub(r"(blocks\\\.\d+\\\.)", rf"\1(?:{re.escape(WRAPPER)})?", own) + ")$"
        groups.append(ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs))
    return OptimizersContainer.Config(param_groups=groups)


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """The configuration of a mixer, or of several with + between."""
    if name.startswith("__"):
        raise AttributeError(name)
    for mixer in name.split("+"):
        seqzoo.mixer_info(mixer)
    return partial(configuration, mixer=name.split("+"))
