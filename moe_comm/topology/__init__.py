"""Rank arithmetic: which rank owns which experts, and how two parallel mappings fold onto the same ranks."""

from moe_comm.topology.mesh import FoldedMesh
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.picture import picture
from moe_comm.topology.placement import ExpertPlacement
from moe_comm.topology.sharding import Box, Sharding, Share, Split, deal, row_range

__all__ = [
    "ATTENTION_AXES",
    "EXPERT_AXES",
    "Box",
    "ExpertPlacement",
    "FoldedMesh",
    "ParallelConfig",
    "Sharding",
    "Share",
    "Split",
    "deal",
    "picture",
    "row_range",
]
