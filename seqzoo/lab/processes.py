"""The processes that share a run: one, or those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seqzoo.lab.errors import LabError

T = TypeVar("T")


class Processes:
    """Where this process stands among the others. Every method but ``local_device`` is for all of them to
    call together; alone, a method hands back what it was given."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and shows progress."""
        return self.rank == 0

    def local_device(self, device: str) -> str:
        """The GPU of this process among those of its machine, if ``device`` leaves that open."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if self.size > 1 and device == "cuda" else device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the processes."""
        return model if self.size == 1 else DistributedDataParallel(model)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of each process's tensor."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def most(self, value: int) -> int:
        """The greatest of each process's number."""
        tensor = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Tensor) -> Tensor:
        """Each process's tensor, in a new first dimension."""
        values = [torch.empty_like(value) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(values, value)
        return torch.stack(values) if self.size > 1 else value[None]

    def only_first(self, action: Callable[[], T]) -> T | None:
        """What ``action`` gives in the first process, the only one to run it; if it fails, all of them do."""
        result, failure = None, [""]
        if self.first:
            try:
                result = action()
            except LabError as error:
                failure = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(failure)
        if failure[0]:
            raise LabError(failure[0])
        return result

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work that waits for the others: one of them gone is a LabError."""
        try:
            yield
        except RuntimeError as error:  # gloo has no error of its own
            if not isinstance(error, dist.DistError) and "by peer" not in str(error):
                raise
            raise LabError("another process of the run has stopped") from error


ALONE = Processes()


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """This process among those that torchrun started, or alone."""
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def without_averaging(model: nn.Module) -> AbstractContextManager[None]:
    """Around the forward and backward pass of all but the last part of a step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
