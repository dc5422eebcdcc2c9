"""torchtitan 0.3 is written for torch's nightly builds; this lends it the names that a release does not have yet."""

import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed import distributed_c10d


def lend_names() -> list[str]:
    """Give torch the names that torchtitan 0.3 wants and the installed torch lacks; those that were lent.

    set_timeout           has a private name up to torch 2.13; the trainer calls it after its first step
    DataParallelMeshDims  is not in torch 2.11; torchtitan imports it, for kinds of sharding that our models don't use
    """
    lent = []
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
        lent.append("set_timeout")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined]
        lent.append("DataParallelMeshDims")
    return lent
