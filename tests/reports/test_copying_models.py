"""A model over several ranks can be copied; pickling it names the call that saves it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.errors import UnsupportedModel
from tests.pool import on_ranks


class OwnExperts(nn.Module):
    """A user's module with experts of its own over a dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = make_dispatcher(4, dist.group.WORLD)
        self.weight = nn.Parameter(torch.ones(2, 8))


def layer(group: dist.ProcessGroup | None) -> MoELayer:
    config = MoEConfig(hidden=8, ffn=16, router=RouterConfig(num_experts=4, top_k=2, balance_loss=0.1))
    return MoELayer.build(config, group)


@on_ranks(2)
def test_pickling_a_model_names_the_call_that_saves_it() -> None:
    built = layer(dist.group.WORLD)
    for owner in (built, nn.Sequential(nn.Linear(8, 8), built), built.dispatcher, OwnExperts()):
        for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
            with pytest.raises(UnsupportedModel, match=r"moe_comm\.state_dict\(model\).*copy\.deepcopy"):
                save(owner)


def test_pickling_in_one_process_names_the_call_too() -> None:
    with pytest.raises(UnsupportedModel, match=r"moe_comm\.state_dict\(model\)"):
        torch.save(nn.Sequential(layer(None)), io.BytesIO())


@on_ranks(2)
def test_copies_share_the_group_and_no_weights(world: int) -> None:
    torch.manual_seed(0)
    built = layer(dist.group.WORLD)
    x_TD = torch.randn(5, 8)
    want_TD = built(x_TD)
    deep, shallow = copy.deepcopy(nn.Sequential(built)), copy.copy(built)
    assert all(torch.equal(copied(x_TD), want_TD) for copied in (deep, shallow))
    with torch.no_grad():
        for p in deep.parameters():
            p.zero_()
    assert torch.equal(built(x_TD), want_TD) and not deep(x_TD).any()
    assert copy.deepcopy(OwnExperts()).dispatcher.world == world
    assert copy.deepcopy(built.router).group is built.router.group


@on_ranks(2)
def test_the_named_calls_save_and_load() -> None:
    first, second, file = layer(dist.group.WORLD), layer(dist.group.WORLD), io.BytesIO()
    torch.save(moe_comm.state_dict(first), file)
    file.seek(0)
    moe_comm.load_state_dict(second, torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
