"""What several processes each hold a part of."""

from typing import Any

import torch.distributed as dist


def of_all(value: Any) -> list[Any]:
    """Everybody's `value`, in the order of the processes; all of them must call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def share(rows: int, rank: int, processes: int, what: str) -> slice:
    """The rows of a process. ValueError if they can't be shared out evenly."""
    if rows % processes:
        raise ValueError(f"{what}: expected rows that {processes} processes can share, got {rows}.")
    each = rows // processes
    return slice(rank * each, (rank + 1) * each)
