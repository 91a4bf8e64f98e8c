"""What MoE transformers are made of: each module works by itself, and on any mapping of ranks."""

from moe_comm.kernels.activations import ACTIVATIONS, Activation, clamped_swiglu, glu
from moe_comm.layers.attention import Attention
from moe_comm.layers.block import TransformerBlock
from moe_comm.layers.config import AttentionConfig, MLAConfig, RopeConfig, TransformerConfig, Yarn
from moe_comm.layers.cross_entropy import vocab_parallel_cross_entropy
from moe_comm.layers.dense import DenseMLP
from moe_comm.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from moe_comm.layers.experts import Experts, Part
from moe_comm.layers.grad_check import CheckGradsConfig, GradReport, check_grads, run_check_grads
from moe_comm.layers.initialize import initialize
from moe_comm.layers.interleave import StageInput
from moe_comm.layers.linear import ColumnParallelLinear, RowParallelLinear
from moe_comm.layers.load import LayerLoad, take_loads, update_biases
from moe_comm.layers.losses import attach_loss
from moe_comm.layers.model_plan import ModelPlan
from moe_comm.layers.moe import Flow, MoEConfig, MoELayer, ZeroExperts
from moe_comm.layers.norm import RMSNorm
from moe_comm.layers.router import Router, RouterConfig, Routing
from moe_comm.layers.sequence import Documents, shard_sequence, unshard_sequence
from moe_comm.layers.shard import shardings_of
from moe_comm.layers.shared import SharedExpert
from moe_comm.layers.shortcut import Shortcut, ShortcutBlock
from moe_comm.layers.state import gather_state_dict, load_full_state_dict, single_rank_copy
from moe_comm.layers.transformer import Transformer
from moe_comm.overlap.executors.grouped import grouped_mlp

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Attention",
    "AttentionConfig",
    "CheckGradsConfig",
    "ColumnParallelLinear",
    "DenseMLP",
    "Documents",
    "Experts",
    "Flow",
    "GradReport",
    "LayerLoad",
    "MLAConfig",
    "MoEConfig",
    "MoELayer",
    "ModelPlan",
    "Part",
    "RMSNorm",
    "RopeConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "RowParallelLinear",
    "SharedExpert",
    "Shortcut",
    "ShortcutBlock",
    "StageInput",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "Yarn",
    "ZeroExperts",
    "attach_loss",
    "check_grads",
    "clamped_swiglu",
    "gather_state_dict",
    "glu",
    "grouped_mlp",
    "initialize",
    "load_full_state_dict",
    "run_check_grads",
    "shard_sequence",
    "shardings_of",
    "single_rank_copy",
    "take_loads",
    "unshard_sequence",
    "update_biases",
    "vocab_parallel_cross_entropy",
]
