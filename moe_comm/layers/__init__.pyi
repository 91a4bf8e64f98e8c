from moe_comm.dispatch.expert_call import grouped_mlp as grouped_mlp
from moe_comm.kernels.activations import (
    ACTIVATIONS as ACTIVATIONS,
    Activation as Activation,
    clamped_swiglu as clamped_swiglu,
    glu as glu,
)
from moe_comm.kernels.expert_mlp import ExpertMLP as ExpertMLP
from moe_comm.layers.attention.config import (
    AttentionConfig as AttentionConfig,
    MLAConfig as MLAConfig,
    RopeConfig as RopeConfig,
    Yarn as Yarn,
)
from moe_comm.layers.attention.layer import Attention as Attention
from moe_comm.layers.attention.sequence import (
    Documents as Documents,
    shard_sequence as shard_sequence,
    unshard_sequence as unshard_sequence,
)
from moe_comm.layers.check import (
    CheckGradsConfig as CheckGradsConfig,
    GradReport as GradReport,
    check_grads as check_grads,
    run_check_grads as run_check_grads,
    single_rank_copy as single_rank_copy,
)
from moe_comm.layers.data_parallel.state import (
    gather_state_dict as gather_state_dict,
    load_state_dict as load_state_dict,
)
from moe_comm.layers.moe.config import (
    MoEConfig as MoEConfig,
    MoEGroups as MoEGroups,
)
from moe_comm.layers.moe.experts import (
    Experts as Experts,
    ExpertSlice as ExpertSlice,
)
from moe_comm.layers.moe.layer import DispatchStats as DispatchStats, MoELayer as MoELayer
from moe_comm.layers.moe.load import (
    LayerLoad as LayerLoad,
    take_loads as take_loads,
    update_biases as update_biases,
)
from moe_comm.layers.moe.losses import attach_loss as attach_loss
from moe_comm.layers.moe.router import (
    Router as Router,
    RouterConfig as RouterConfig,
    Routing as Routing,
    ZeroExperts as ZeroExperts,
)
from moe_comm.layers.moe.shared import SharedExpert as SharedExpert
from moe_comm.layers.parallel.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from moe_comm.layers.parallel.dense import DenseMLP as DenseMLP, RMSNorm as RMSNorm
from moe_comm.layers.parallel.embedding import (
    VocabParallelEmbedding as VocabParallelEmbedding,
    VocabParallelHead as VocabParallelHead,
)
from moe_comm.layers.parallel.interleave import BackwardTurns as BackwardTurns
from moe_comm.layers.parallel.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from moe_comm.layers.parallel.module import shardings_of as shardings_of
from moe_comm.layers.transformer.block import (
    Shortcut as Shortcut,
    ShortcutBlock as ShortcutBlock,
    TransformerBlock as TransformerBlock,
)
from moe_comm.layers.transformer.config import TransformerConfig as TransformerConfig
from moe_comm.layers.transformer.initialize import initialize as initialize
from moe_comm.layers.transformer.model import StageInput as StageInput, Transformer as Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan as ModelPlan
