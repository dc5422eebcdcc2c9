"""A language model of any mixers as a LightningModule."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F

import seqzoo
from seqzoo.lab.metrics import BitsPerByte

from .processes import of_all

Batch = Tensor | Sequence[Tensor]


class SeqzooModule(lightning.LightningModule):
    """A seqzoo.LanguageModel that Lightning trains: next-token cross entropy, AdamW, warm-up and cosine.

    A batch is tokens [B, T + 1], or inputs and targets, [B, T] each; a target of -100 does not count. Parameters train as
    `seqzoo.param_groups` says. Training logs `train_loss` in nats, validation `valid_bits`, bits per token. With data that
    depend on the step alone, such as `StepData`, a run that goes on from a checkpoint computes the bits it would have:
    random numbers are kept in the checkpoint too. All arguments are plain values, for a configuration file or LightningCLI.

    Args:
        vocab_size: number of tokens.
        dim: width D.
        depth: number of blocks.
        mixer: as `seqzoo.LanguageModel`: a name, a configuration, or a list of these.
        ffn_dim: as `seqzoo.LanguageModel`.
        dropout: as `seqzoo.LanguageModel`.
        lower_bound: as `seqzoo.LanguageModel`.
        lr: the highest learning rate.
        weight_decay: of the parameters that decay.
        betas: of AdamW.
        warmup: share of the steps.
        final_lr: share of lr that the cosine ends at.

    Raises:
        ValueError, TypeError: as `seqzoo.LanguageModel`.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 4,
        mixer: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "hgrn2",
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        lower_bound: str | None = "lm",
        lr: float = 4e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup: float = 0.1,
        final_lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = seqzoo.LanguageModel(
            vocab_size, dim, depth, mixer=mixer, ffn_dim=ffn_dim, dropout=dropout, lower_bound=lower_bound
        )
        self.bits = BitsPerByte()
        self.state: Any = None  # what the next batch goes on from; see CarryState
        self.last_state: Any = None  # after the batch before
        self.random: dict[str, Tensor] | None = None  # of the checkpoint, until the first batch

    def forward(self, tokens: Tensor, state: Any = None, **call: Any) -> tuple[Tensor, Any]:
        """Logits [B, T, vocab_size] of tokens [B, T], and the state; as `seqzoo.LanguageModel`."""
        return self.model(tokens, state, **call)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, targets = _split(batch)
        logits, self.last_state = self.model(inputs, self.state)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = _split(batch)
        self.bits.update(self.model(inputs)[0], targets)
        self.log("valid_bits", self.bits, prog_bar=True)

    def configure_optimizers(self) -> Any:
        own = self.hparams
        groups = seqzoo.param_groups(self.model, lr=own["lr"], weight_decay=own["weight_decay"])
        optimizer = torch.optim.AdamW(groups, betas=tuple(own["betas"]))
        steps = self.trainer.estimated_stepping_batches
        warm = max(1, round(own["warmup"] * steps)) if math.isfinite(steps) else 1

        def share(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            done = min(1.0, (step - warm) / max(1, steps - warm))
            return float(own["final_lr"] + (1 - own["final_lr"]) * (1 + math.cos(math.pi * done)) / 2)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint["seqzoo_random"] = of_all(random)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]  # which Lightning loads before it brings a module to its precision
        for name, parameter in self.named_parameters():
            if name in saved:
                parameter.data = parameter.data.to(saved[name].dtype)
        every = checkpoint.get("seqzoo_random", [])
        if self._trainer is not None and len(every) == self.trainer.world_size:
            self.random = every[self.trainer.global_rank]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.random is None:
            return
        torch.set_rng_state(self.random["cpu"].cpu())
        if "cuda" in self.random:
            torch.cuda.set_rng_state(self.random["cuda"].cpu(), self.device)
        self.random = None


def _split(batch: Batch) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Tensor):
        return batch[:, :-1], batch[:, 1:]
    inputs, targets = batch
    return inputs, targets
