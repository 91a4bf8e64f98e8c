from moe_comm.layers.data_parallel.attach import (
    attach_experts as attach_experts,
    expert_modules as expert_modules,
    expert_parameters as expert_parameters,
    leave_gradients as leave_gradients,
    skip_gradient_checks as skip_gradient_checks,
)
from moe_comm.layers.data_parallel.expert_shard import (
    ExpertShard as ExpertShard,
    ExpertShards as ExpertShards,
)
from moe_comm.layers.data_parallel.mark import mark_experts as mark_experts
from moe_comm.layers.data_parallel.replicas import check_replicas as check_replicas
from moe_comm.layers.data_parallel.state import (
    gather_gradients as gather_gradients,
    gather_state_dict as gather_state_dict,
    load_optimizer_state_dict as load_optimizer_state_dict,
    load_state_dict as load_state_dict,
    optimizer_state_dict as optimizer_state_dict,
    state_dict as state_dict,
)
from moe_comm.layers.data_parallel.sync import (
    clip_grad_norm_ as clip_grad_norm_,
    prepare_ddp as prepare_ddp,
    prepare_fsdp as prepare_fsdp,
    sum_replicated_gradients as sum_replicated_gradients,
    sync_gradients as sync_gradients,
)
