"""States carried from batch to batch: truncated backpropagation through time."""

from typing import Any

import lightning
import torch
from torch import Tensor

from seqzoo import states

from .module import Batch, SeqzooModule
from .processes import of_all, share


class CarryState(lightning.Callback):
    """Each training batch goes on from the state after the one before, without its history.

    So row b of a batch must continue row b of the batch before, as the rows of a long text cut into columns do. An epoch
    starts from nothing. Checkpoints hold the state of all rows, which any number of processes may share again.

    Raises:
        ValueError: a batch has another number of rows than the one before.
    """

    def __init__(self) -> None:
        self.loaded: list[Tensor] | None = None  # of a checkpoint, until the next batch
        self.epoch = 0  # that the newest state is of
        self.module: SeqzooModule | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = pl_module
        pl_module.state = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        rows = (batch if isinstance(batch, Tensor) else batch[0]).shape[0]
        if self.loaded is not None and trainer.current_epoch == self.epoch:
            kept = iter(self.loaded)
            mine = share(
                len(self.loaded[0]),
                trainer.global_rank,
                trainer.world_size,
                "CarryState: a checkpoint's state",
            )
            pl_module.state = states.map_state(
                lambda t: next(kept)[mine].to(pl_module.device), pl_module.model.init_state(rows)
            )
        self.loaded = None
        if pl_module.state is not None and next(states.leaves(pl_module.state)).shape[0] != rows:
            raise ValueError(
                f"CarryState: expected a batch of {next(states.leaves(pl_module.state)).shape[0]} rows, which go on from "
                f"the batch before, got {rows}."
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.state, self.epoch = states.detach(pl_module.last_state), trainer.current_epoch

    def state_dict(self) -> dict[str, Any]:
        state = None if self.module is None else self.module.state
        mine = [] if state is None else [t.cpu() for t in states.leaves(state)]
        kept = [torch.cat(parts) for parts in zip(*of_all(mine), strict=True)]  # the rows of all processes
        return {"state": kept or None, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded, self.epoch = state_dict["state"], state_dict["epoch"]
