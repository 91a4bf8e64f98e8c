"""Ranks in different numbers of process groups reduce gradients; FSDP, which cannot, raises on each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.errors import ConfigError
from tests.pool import on_ranks


@on_ranks(4)
def test_experts_of_two_groups_have_the_gradients_of_both(rank: int, world: int) -> None:
    """torch names groups of some ranks by the number of groups that a rank belongs to."""
    group = dist.new_subgroups(group_size=2)[0]
    others = dist.new_group([0, 1])  # only ranks 0 and 1 belong to it
    layer = MoELayer.build(MoEConfig(hidden=8, ffn=16, router=RouterConfig(4, 2)), group, seed=0)
    generator = torch.Generator().manual_seed(rank % 2)
    x_TD = torch.randn(5, 8, generator=generator, dtype=torch.float32, device="cpu")
    layer(x_TD).square().sum().backward()
    own = layer.experts.w13.grad.clone()
    moe_comm.sync_gradients(layer)
    assert torch.equal(layer.experts.w13.grad, own + own)  # both groups have the same tokens
    with pytest.raises(ConfigError, match="number of groups that a rank belongs to"):
        moe_comm.prepare_fsdp(layer)
    if rank < 2:
        dist.destroy_process_group(others)
