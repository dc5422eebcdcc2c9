"""Batches that are a function of the step, so that a run goes on where it stopped."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from seqzoo.lab import Task
from seqzoo.lab.tasks import create_task


class StepData(lightning.LightningDataModule):
    """A task of the lab for Lightning, such as the text of a folder: each batch depends on its number alone.

    Args:
        task: its name, such as "text", or what `seqzoo.lab.tasks.create_task` made of it.
        batch_size: sequences in a batch.
        steps_per_epoch: batches between two epochs' ends, where Lightning validates by default.
        seed: of the batches.
        options: of a task that was given by name; for "text" `data`, a file or a folder, and `seq_len`.

    Raises:
        ValueError: there is no such task or option. TypeError: options are given for a task that is made already.
    """

    def __init__(
        self,
        task: str | Task = "text",
        batch_size: int = 8,
        steps_per_epoch: int = 100,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if options and not isinstance(task, str):
            raise TypeError("StepData: options are those of a task given by name, got a task that is made.")
        self.task = create_task(task, **(options or {})) if isinstance(task, str) else task
        self.batch_size, self.steps_per_epoch, self.seed = batch_size, steps_per_epoch, seed

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
