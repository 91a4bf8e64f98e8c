from moe_comm.topology.drawing import picture as picture
from moe_comm.topology.mesh import ParallelMesh as ParallelMesh
from moe_comm.topology.parallel import (
    ATTENTION_AXES as ATTENTION_AXES,
    EXPERT_AXES as EXPERT_AXES,
    ParallelConfig as ParallelConfig,
)
from moe_comm.topology.placement import ExpertPlacement as ExpertPlacement, Placement as Placement
from moe_comm.topology.routing_placement import (
    placement_from_routing as placement_from_routing,
    remote_copies as remote_copies,
)
from moe_comm.topology.sharding import (
    Box as Box,
    Sharding as Sharding,
    ShardSlice as ShardSlice,
    Split as Split,
    row_range as row_range,
    shard_slice as shard_slice,
)
