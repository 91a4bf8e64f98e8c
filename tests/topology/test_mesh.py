"""``ParallelMesh`` on 4 and 8 real ranks: its groups have the right ranks, and its DeviceMeshes use the same groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import ConfigError
from moe_comm.topology import ATTENTION_AXES, EXPERT_AXES, ParallelConfig, ParallelMesh, Sharding, Split
from moe_comm.topology.mesh import GROUPS
from tests.pool import RankPool

FOUR = [
    ParallelConfig(cp=2, pp=2, ep=2),
    ParallelConfig(dp=4, ep=2, etp=2),
    ParallelConfig(pp=4),
]
EIGHT = [
    ParallelConfig(tp=2, cp=2, dp=2, ep=8),
    ParallelConfig(tp=2, dp=2, pp=2, ep=4),
]


def members(group: Any) -> tuple[int, ...]:
    """Return the ranks of ``group``, gathered by a collective over it."""
    if group is None:
        return (dist.get_rank(),)
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=group)
    return tuple(int(rank) for rank in ranks)


def check_mesh(rank: int, world: int, config: ParallelConfig) -> dict[str, Any]:
    mesh = ParallelMesh(config)
    assert mesh.attention is not None and mesh.expert is not None and mesh.rank == rank
    assert mesh.place == config.place(rank) and mesh.sizes == config.sizes
    group_ranks: dict[str, Any] = {"+".join(axes): members(mesh.group(*axes)) for axes in GROUPS}
    for device_mesh, axes_of_grid in ((mesh.attention, ATTENTION_AXES), (mesh.expert, EXPERT_AXES)):
        assert device_mesh.mesh_dim_names == tuple(reversed(axes_of_grid))
        assert tuple(device_mesh.mesh.shape) == tuple(config.sizes[axis] for axis in reversed(axes_of_grid))
        for axis in axes_of_grid:
            axis_mesh = device_mesh[axis]
            assert axis_mesh.get_local_rank() == config.place(rank)[axis] and axis_mesh.size() == config.sizes[axis]
            assert members(axis_mesh.get_group()) == group_ranks[axis], (axis, config)
    flat = mesh.flat_mesh("cp", "dp")
    assert tuple(flat.mesh.tolist()) == members(flat.get_group()) == group_ranks["cp+dp"]
    group_ranks["world"] = members(mesh.world_group)
    if mesh.tied_group is not None:
        group_ranks["tied"] = members(mesh.tied_group)
    sums = {
        "cut": Sharding((4,), (Split(0, "tp"),)),
        "whole": Sharding((4,)),
        "expert": Sharding((4, 4), (Split(0, "ep"), Split(1, "etp")), expert=True),
    }
    group_ranks |= {f"sum {name}": members(mesh.sum_group(sharding)) for name, sharding in sums.items()}
    with pytest.raises(ConfigError, match=f"for {2 * world} ranks, but the world size is {world}"):
        ParallelMesh(ParallelConfig(dp=2 * world))
    if min(config.tp, config.cp, config.dp) > 1:
        with pytest.raises(ConfigError, match="no group over"):
            mesh.group("tp", "dp")
    return group_ranks


def assert_groups_match(pool: RankPool, config: ParallelConfig) -> None:
    for rank, group_ranks in enumerate(pool.run(check_mesh, config, timeout=120)):
        for axes in GROUPS:
            assert group_ranks["+".join(axes)] == config.group_of(rank, *axes), (rank, axes)
        assert group_ranks["world"] == tuple(range(config.world))
        assert group_ranks["sum cut"] == config.group_of(rank, "cp", "dp")
        assert group_ranks["sum whole"] == config.group_of(rank, "tp", "cp", "dp")
        assert group_ranks["sum expert"] == config.group_of(rank, "edp")
        pipeline = config.group_of(rank, "pp")
        ends = (pipeline[0], pipeline[-1])
        assert group_ranks.get("tied") == (ends if config.pp > 1 and rank in ends else None)


@pytest.mark.parametrize("config", FOUR, ids=str)
def test_groups_of_four_ranks(pool4: RankPool, config: ParallelConfig) -> None:
    assert_groups_match(pool4, config)


@pytest.mark.parametrize("config", EIGHT, ids=str)
def test_groups_of_eight_ranks(pool8: RankPool, config: ParallelConfig) -> None:
    assert_groups_match(pool8, config)


def test_one_rank_needs_no_process_group() -> None:
    mesh = ParallelMesh(ParallelConfig())
    assert mesh.attention is None and mesh.expert is None and mesh.world_group is None and mesh.tied_group is None
    assert all(mesh.group(*axes) is None and mesh.ranks(*axes) == (0,) for axes in GROUPS)
    with pytest.raises(ConfigError, match="for 2 ranks, but the world size is 1"):
        ParallelMesh(ParallelConfig(dp=2))
