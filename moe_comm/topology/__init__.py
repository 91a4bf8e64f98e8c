"""Rank arithmetic: which rank owns which experts, and how two parallel mappings fold onto the same ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.deprecated import loads_renamed
from moe_comm.lazy import loads_on_use

if TYPE_CHECKING:
    from moe_comm.topology.drawing import picture
    from moe_comm.topology.mesh import ParallelMesh
    from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
    from moe_comm.topology.placement import ExpertPlacement
    from moe_comm.topology.sharding import Box, Sharding, Share, Split, deal, row_range

__all__ = [
    "ATTENTION_AXES",
    "EXPERT_AXES",
    "Box",
    "ExpertPlacement",
    "ParallelConfig",
    "ParallelMesh",
    "Sharding",
    "Share",
    "Split",
    "deal",
    "picture",
    "row_range",
]

_HOME = {
    "ATTENTION_AXES": "moe_comm.topology.parallel",
    "Box": "moe_comm.topology.sharding",
    "EXPERT_AXES": "moe_comm.topology.parallel",
    "ExpertPlacement": "moe_comm.topology.placement",
    "ParallelMesh": "moe_comm.topology.mesh",
    "ParallelConfig": "moe_comm.topology.parallel",
    "Sharding": "moe_comm.topology.sharding",
    "Share": "moe_comm.topology.sharding",
    "Split": "moe_comm.topology.sharding",
    "deal": "moe_comm.topology.sharding",
    "picture": "moe_comm.topology.drawing",
    "row_range": "moe_comm.topology.sharding",
}

__getattr__ = loads_renamed(__name__, {"FoldedMesh": "ParallelMesh"}, loads_on_use(__name__, _HOME))
