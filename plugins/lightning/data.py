"""Batches that are a function of the step, so that a run goes on where it stopped."""

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from seqzoo.lab import Task


class StepData(lightning.LightningDataModule):
    """A task of the lab for Lightning, such as the text of a folder: each batch depends on its number alone.

    Args:
        task: as `seqzoo.lab.tasks.create_task` makes it.
        batch_size: sequences in a batch.
        steps_per_epoch: batches between two epochs' ends, where Lightning validates by default.
        seed: of the batches.
    """

    def __init__(self, task: Task, batch_size: int = 8, steps_per_epoch: int = 100, seed: int = 0) -> None:
        super().__init__()
        self.task, self.batch_size, self.steps_per_epoch, self.seed = task, batch_size, steps_per_epoch, seed

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(_Steps(self))

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(list(self.task.valid_batches(self.batch_size)))

    def _loader(self, batches: Any) -> DataLoader[Any]:
        # a generator of its own: a loader's first act is to draw a seed, which would move the model's random numbers
        return DataLoader(batches, batch_size=None, generator=torch.Generator())


class _Steps(IterableDataset[tuple[Tensor, Tensor]]):
    """From the batch that the trainer is at to the end of its epoch."""

    def __init__(self, data: StepData) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.data
        first = data.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[union-attr]
        for step in range(first, (first // data.steps_per_epoch + 1) * data.steps_per_epoch):
            yield data.task.train_batch(step, data.batch_size, data.seed)
