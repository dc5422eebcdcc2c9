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
        setattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)  # noqa: B010
        lent.append("set_timeout")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        setattr(fsdp, "DataParallelMeshDims", type("DataParallelMeshDims", (), {}))  # noqa: B010
        lent.append("DataParallelMeshDims")
    return lent
