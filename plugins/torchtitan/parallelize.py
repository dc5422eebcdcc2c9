"""FSDP2, activation checkpointing and torch.compile for a SeqzooModel."""

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    get_fsdp_reshard_after_forward_policy,
)

from .model import SeqzooModel


def parallelize(
    model: SeqzooModel,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> SeqzooModel:
    """The model with what the configuration asks for: each block a unit of FSDP2, the rest another."""
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    model.autocast = None if dtype == torch.float32 else dtype
    replicated = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh([*replicated, "fsdp"]),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce]),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp_enabled=False)
    for block in model.layers:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # nothing is divided, and gloo has no other sum
    return model
