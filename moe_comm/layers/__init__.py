"""What MoE transformers are made of: each module works by itself, and on any mapping of ranks.

The names below load their modules on first use: an MoE layer needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.lazy import loads_on_use

if TYPE_CHECKING:
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

__getattr__ = loads_on_use(
    __name__,
    {
        "ACTIVATIONS": "moe_comm.kernels.activations",
        "Activation": "moe_comm.kernels.activations",
        "Attention": "moe_comm.layers.attention",
        "AttentionConfig": "moe_comm.layers.config",
        "CheckGradsConfig": "moe_comm.layers.grad_check",
        "ColumnParallelLinear": "moe_comm.layers.linear",
        "DenseMLP": "moe_comm.layers.dense",
        "Documents": "moe_comm.layers.sequence",
        "Experts": "moe_comm.layers.experts",
        "Flow": "moe_comm.layers.moe",
        "GradReport": "moe_comm.layers.grad_check",
        "LayerLoad": "moe_comm.layers.load",
        "MLAConfig": "moe_comm.layers.config",
        "MoEConfig": "moe_comm.layers.moe",
        "MoELayer": "moe_comm.layers.moe",
        "ModelPlan": "moe_comm.layers.model_plan",
        "Part": "moe_comm.layers.experts",
        "RMSNorm": "moe_comm.layers.norm",
        "RopeConfig": "moe_comm.layers.config",
        "Router": "moe_comm.layers.router",
        "RouterConfig": "moe_comm.layers.router",
        "Routing": "moe_comm.layers.router",
        "RowParallelLinear": "moe_comm.layers.linear",
        "SharedExpert": "moe_comm.layers.shared",
        "Shortcut": "moe_comm.layers.shortcut",
        "ShortcutBlock": "moe_comm.layers.shortcut",
        "StageInput": "moe_comm.layers.interleave",
        "Transformer": "moe_comm.layers.transformer",
        "TransformerBlock": "moe_comm.layers.block",
        "TransformerConfig": "moe_comm.layers.config",
        "VocabParallelEmbedding": "moe_comm.layers.embedding",
        "VocabParallelHead": "moe_comm.layers.embedding",
        "Yarn": "moe_comm.layers.config",
        "ZeroExperts": "moe_comm.layers.moe",
        "attach_loss": "moe_comm.layers.losses",
        "check_grads": "moe_comm.layers.grad_check",
        "clamped_swiglu": "moe_comm.kernels.activations",
        "gather_state_dict": "moe_comm.layers.state",
        "glu": "moe_comm.kernels.activations",
        "grouped_mlp": "moe_comm.overlap.executors.grouped",
        "initialize": "moe_comm.layers.initialize",
        "load_full_state_dict": "moe_comm.layers.state",
        "run_check_grads": "moe_comm.layers.grad_check",
        "shard_sequence": "moe_comm.layers.sequence",
        "shardings_of": "moe_comm.layers.shard",
        "single_rank_copy": "moe_comm.layers.state",
        "take_loads": "moe_comm.layers.load",
        "unshard_sequence": "moe_comm.layers.sequence",
        "update_biases": "moe_comm.layers.load",
        "vocab_parallel_cross_entropy": "moe_comm.layers.cross_entropy",
    },
)
