from moe_comm.integrations.hugging_face.accelerator import prepare_accelerator as prepare_accelerator
from moe_comm.integrations.hugging_face.architecture import (
    from_hugging_face as from_hugging_face,
    to_hugging_face as to_hugging_face,
)
from moe_comm.integrations.hugging_face.attention import (
    gather_attention as gather_attention,
    parallelize_attention as parallelize_attention,
    shard_inputs as shard_inputs,
    swap_attention as swap_attention,
    swapped_attention as swapped_attention,
)
from moe_comm.integrations.hugging_face.families import FAMILIES as FAMILIES
from moe_comm.integrations.hugging_face.linears import (
    gather_linears as gather_linears,
    parallelize_linears as parallelize_linears,
    swap_linears as swap_linears,
    swapped_linears as swapped_linears,
)
from moe_comm.integrations.hugging_face.registries import register as register
from moe_comm.integrations.hugging_face.routing import RoutingRecord as RoutingRecord, record_routing as record_routing
from moe_comm.integrations.hugging_face.state import save_swapped as save_swapped
from moe_comm.integrations.hugging_face.swap import (
    EPExperts as EPExperts,
    expert_parameters as expert_parameters,
    swapped_experts as swapped_experts,
)
from moe_comm.integrations.hugging_face.trainer import (
    MoETrainer as MoETrainer,
    MoETrainerMixin as MoETrainerMixin,
    prepare_trainer as prepare_trainer,
)
from moe_comm.integrations.swap import (
    parallelize_moe as parallelize_moe,
    swap_moe as swap_moe,
)
from moe_comm.layers.data_parallel.state import gather_state_dict as gather_state_dict
from moe_comm.layers.data_parallel.sync import sum_replicated_gradients as sum_replicated_gradients
from moe_comm.topology.mesh import expert_mesh as expert_mesh
