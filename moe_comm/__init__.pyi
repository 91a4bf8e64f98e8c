from moe_comm.dispatch.dispatcher import Dispatcher as Dispatcher
from moe_comm.dispatch.selection.choice import Traffic as Traffic
from moe_comm.dispatch.selection.factory import make_dispatcher as make_dispatcher
from moe_comm.dispatch.slots.capacity import Capacity as Capacity
from moe_comm.dispatch.types import (
    Dispatched as Dispatched,
    DispatchHandle as DispatchHandle,
    DispatchOptions as DispatchOptions,
    PeerToPeerOptions as PeerToPeerOptions,
)
from moe_comm.dispatch.wire_dtype import (
    WireDtype as WireDtype,
    WireDtypes as WireDtypes,
)
from moe_comm.integrations.blocks.adapter import block_adapter as block_adapter
from moe_comm.integrations.checkpoint.load import LoadReport as LoadReport, load_checkpoint as load_checkpoint
from moe_comm.integrations.checkpoint.save import save_checkpoint as save_checkpoint
from moe_comm.integrations.hugging_face.attention import (
    parallelize_attention as parallelize_attention,
    swap_attention as swap_attention,
)
from moe_comm.integrations.hugging_face.linears import (
    parallelize_linears as parallelize_linears,
    swap_linears as swap_linears,
)
from moe_comm.integrations.hugging_face.state import save_swapped as save_swapped
from moe_comm.integrations.offload.cache import ExpertOffload as ExpertOffload
from moe_comm.integrations.offloading import (
    offload_experts as offload_experts,
    offload_report as offload_report,
)
from moe_comm.integrations.pretrained import from_pretrained as from_pretrained
from moe_comm.integrations.serving import serve_experts as serve_experts, serving as serving
from moe_comm.integrations.swap import (
    parallelize_moe as parallelize_moe,
    swap_moe as swap_moe,
)
from moe_comm.kernels.activations import Activation as Activation
from moe_comm.layers.attention.config import (
    AttentionConfig as AttentionConfig,
    MLAConfig as MLAConfig,
    RopeConfig as RopeConfig,
)
from moe_comm.layers.attention.layer import Attention as Attention
from moe_comm.layers.check import (
    GradReport as GradReport,
    check_grads as check_grads,
)
from moe_comm.layers.data_parallel.attach import skip_gradient_checks as skip_gradient_checks
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
    sync_gradients as sync_gradients,
)
from moe_comm.layers.moe.config import (
    MoEConfig as MoEConfig,
    MoEGroups as MoEGroups,
)
from moe_comm.layers.moe.experts import Experts as Experts
from moe_comm.layers.moe.formula import MoEBlock as MoEBlock
from moe_comm.layers.moe.layer import DispatchStats as DispatchStats, MoELayer as MoELayer
from moe_comm.layers.moe.losses import scale_aux_like as scale_aux_like
from moe_comm.layers.moe.router import (
    Router as Router,
    RouterConfig as RouterConfig,
    Routing as Routing,
    ZeroExperts as ZeroExperts,
)
from moe_comm.layers.moe.shared import SharedExpert as SharedExpert
from moe_comm.layers.transformer.config import TransformerConfig as TransformerConfig
from moe_comm.layers.transformer.model import Transformer as Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan as ModelPlan
from moe_comm.overlap.options import Overlap as Overlap
from moe_comm.topology.balance import Balance as Balance
from moe_comm.topology.mesh import ParallelMesh as ParallelMesh
from moe_comm.topology.parallel import ParallelConfig as ParallelConfig
from moe_comm.topology.placement import ExpertPlacement as ExpertPlacement, Placement as Placement

__version__: str
