"""Expert-parallel layers in any training loop: gradients, norms and state dicts equal to those of one process.

Data-parallel wrappers, optimizers and checkpoints of torch treat every parameter as replicated: rank 0's copy stands
for all. Parameters of experts are not replicated; each rank of the expert-parallel group holds others, under the same
names. This package makes that difference known:

    module          what it does
    expert_shard    a tensor that knows it is one rank's part: its norm covers all ranks, DCP saves all parts
    attach          connects the experts module of a layer to the rest when the layer is built or swapped
    gradients       one convention, sum or mean, for the gradients of experts and of replicated parameters
    audit           compares what backward computed with what the optimizer receives, and raises if they disagree
    optimizers      what optimizers know of expert parameters
    sync            sync_gradients, clip_grad_norm_, prepare_ddp, prepare_fsdp
    state           state_dict, load_state_dict, optimizer_state_dict, load_optimizer_state_dict
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.lazy import loads_on_use

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.attach import (
        attach_experts,
        expert_modules,
        expert_parameters,
        leave_gradients,
        skip_gradient_checks,
    )
    from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards
    from moe_comm.layers.data_parallel.state import (
        load_optimizer_state_dict,
        load_state_dict,
        optimizer_state_dict,
        state_dict,
    )
    from moe_comm.layers.data_parallel.sync import (
        clip_grad_norm_,
        prepare_ddp,
        prepare_fsdp,
        sum_replicated_gradients,
        sync_gradients,
    )

__all__ = [
    "ExpertShard",
    "ExpertShards",
    "attach_experts",
    "clip_grad_norm_",
    "expert_modules",
    "expert_parameters",
    "leave_gradients",
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "prepare_ddp",
    "prepare_fsdp",
    "skip_gradient_checks",
    "state_dict",
    "sum_replicated_gradients",
    "sync_gradients",
]

__getattr__ = loads_on_use(
    __name__,
    {
        "ExpertShard": "moe_comm.layers.data_parallel.expert_shard",
        "ExpertShards": "moe_comm.layers.data_parallel.expert_shard",
        "attach_experts": "moe_comm.layers.data_parallel.attach",
        "clip_grad_norm_": "moe_comm.layers.data_parallel.sync",
        "expert_modules": "moe_comm.layers.data_parallel.attach",
        "expert_parameters": "moe_comm.layers.data_parallel.attach",
        "leave_gradients": "moe_comm.layers.data_parallel.attach",
        "load_optimizer_state_dict": "moe_comm.layers.data_parallel.state",
        "load_state_dict": "moe_comm.layers.data_parallel.state",
        "optimizer_state_dict": "moe_comm.layers.data_parallel.state",
        "prepare_ddp": "moe_comm.layers.data_parallel.sync",
        "prepare_fsdp": "moe_comm.layers.data_parallel.sync",
        "skip_gradient_checks": "moe_comm.layers.data_parallel.attach",
        "state_dict": "moe_comm.layers.data_parallel.state",
        "sum_replicated_gradients": "moe_comm.layers.data_parallel.sync",
        "sync_gradients": "moe_comm.layers.data_parallel.sync",
    },
)
