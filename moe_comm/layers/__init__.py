"""What MoE transformers are made of: each module works by itself, and on any mapping of ranks.

The names below load their modules on first use: an MoE layer needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.deprecated import loads_renamed
from moe_comm.lazy import loads_on_use

if TYPE_CHECKING:
    from moe_comm.kernels.activations import ACTIVATIONS, Activation, clamped_swiglu, glu
    from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig, Yarn
    from moe_comm.layers.attention.layer import Attention
    from moe_comm.layers.attention.sequence import Documents, shard_sequence, unshard_sequence
    from moe_comm.layers.check.gradients import CheckGradsConfig, GradReport, check_grads, run_check_grads
    from moe_comm.layers.moe.experts import Experts, Part
    from moe_comm.layers.moe.layer import DispatchStats, MoEConfig, MoELayer, ZeroExperts
    from moe_comm.layers.moe.load import LayerLoad, take_loads, update_biases
    from moe_comm.layers.moe.losses import attach_loss
    from moe_comm.layers.moe.router import Router, RouterConfig, Routing
    from moe_comm.layers.moe.shared import SharedExpert
    from moe_comm.layers.parallel.cross_entropy import vocab_parallel_cross_entropy
    from moe_comm.layers.parallel.dense import DenseMLP
    from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
    from moe_comm.layers.parallel.interleave import StageInput
    from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear
    from moe_comm.layers.parallel.norm import RMSNorm
    from moe_comm.layers.parallel.shard import shardings_of
    from moe_comm.layers.transformer.block import TransformerBlock
    from moe_comm.layers.transformer.config import TransformerConfig
    from moe_comm.layers.transformer.initialize import initialize
    from moe_comm.layers.transformer.model import Transformer
    from moe_comm.layers.transformer.model_plan import ModelPlan
    from moe_comm.layers.transformer.shortcut import Shortcut, ShortcutBlock
    from moe_comm.layers.transformer.state import gather_state_dict, load_full_state_dict, single_rank_copy
    from moe_comm.overlap.executors.serial import grouped_mlp

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Attention",
    "AttentionConfig",
    "CheckGradsConfig",
    "ColumnParallelLinear",
    "DenseMLP",
    "DispatchStats",
    "Documents",
    "Experts",
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

_HOME = {
    "ACTIVATIONS": "moe_comm.kernels.activations",
    "Activation": "moe_comm.kernels.activations",
    "Attention": "moe_comm.layers.attention.layer",
    "AttentionConfig": "moe_comm.layers.attention.config",
    "CheckGradsConfig": "moe_comm.layers.check.gradients",
    "ColumnParallelLinear": "moe_comm.layers.parallel.linear",
    "DenseMLP": "moe_comm.layers.parallel.dense",
    "Documents": "moe_comm.layers.attention.sequence",
    "Experts": "moe_comm.layers.moe.experts",
    "DispatchStats": "moe_comm.layers.moe.layer",
    "GradReport": "moe_comm.layers.check.gradients",
    "LayerLoad": "moe_comm.layers.moe.load",
    "MLAConfig": "moe_comm.layers.attention.config",
    "MoEConfig": "moe_comm.layers.moe.layer",
    "MoELayer": "moe_comm.layers.moe.layer",
    "ModelPlan": "moe_comm.layers.transformer.model_plan",
    "Part": "moe_comm.layers.moe.experts",
    "RMSNorm": "moe_comm.layers.parallel.norm",
    "RopeConfig": "moe_comm.layers.attention.config",
    "Router": "moe_comm.layers.moe.router",
    "RouterConfig": "moe_comm.layers.moe.router",
    "Routing": "moe_comm.layers.moe.router",
    "RowParallelLinear": "moe_comm.layers.parallel.linear",
    "SharedExpert": "moe_comm.layers.moe.shared",
    "Shortcut": "moe_comm.layers.transformer.shortcut",
    "ShortcutBlock": "moe_comm.layers.transformer.shortcut",
    "StageInput": "moe_comm.layers.parallel.interleave",
    "Transformer": "moe_comm.layers.transformer.model",
    "TransformerBlock": "moe_comm.layers.transformer.block",
    "TransformerConfig": "moe_comm.layers.transformer.config",
    "VocabParallelEmbedding": "moe_comm.layers.parallel.embedding",
    "VocabParallelHead": "moe_comm.layers.parallel.embedding",
    "Yarn": "moe_comm.layers.attention.config",
    "ZeroExperts": "moe_comm.layers.moe.layer",
    "attach_loss": "moe_comm.layers.moe.losses",
    "check_grads": "moe_comm.layers.check.gradients",
    "clamped_swiglu": "moe_comm.kernels.activations",
    "gather_state_dict": "moe_comm.layers.transformer.state",
    "glu": "moe_comm.kernels.activations",
    "grouped_mlp": "moe_comm.overlap.executors.serial",
    "initialize": "moe_comm.layers.transformer.initialize",
    "load_full_state_dict": "moe_comm.layers.transformer.state",
    "run_check_grads": "moe_comm.layers.check.gradients",
    "shard_sequence": "moe_comm.layers.attention.sequence",
    "shardings_of": "moe_comm.layers.parallel.shard",
    "single_rank_copy": "moe_comm.layers.transformer.state",
    "take_loads": "moe_comm.layers.moe.load",
    "unshard_sequence": "moe_comm.layers.attention.sequence",
    "update_biases": "moe_comm.layers.moe.load",
    "vocab_parallel_cross_entropy": "moe_comm.layers.parallel.cross_entropy",
}

__getattr__ = loads_renamed(__name__, {"Flow": "DispatchStats"}, loads_on_use(__name__, _HOME))
