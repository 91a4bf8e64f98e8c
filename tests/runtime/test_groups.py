"""Invalid process groups: no group although WORLD_SIZE is larger than 1, and a group without this rank."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import gather_dim, sum_values
from moe_comm.layers.parallel.linear import ColumnParallelLinear
from moe_comm.runtime.launch import init_ranks, launch
from tests.layers.tiny import TINY
from tests.pool import RankPool, start_server

CONFIG = MoEConfig(hidden=8, ffn=8, router=RouterConfig(num_experts=4, top_k=2))

BUILDS: dict[str, Callable[[], object]] = {
    "MoELayer": lambda: MoELayer.build(CONFIG),
    "make_dispatcher": lambda: make_dispatcher(4),
    "swap_moe": lambda: moe_comm.swap_moe(hugging_face_model()),
    "swap_linears": lambda: moe_comm.swap_linears(hugging_face_model()),
    "swap_attention": lambda: moe_comm.swap_attention(hugging_face_model()),
    "ColumnParallelLinear": lambda: ColumnParallelLinear(8, 8),
    "Transformer": lambda: moe_comm.Transformer(TINY),
}


def hugging_face_model() -> nn.Module:
    from tests.integrations.models import new_model

    return cast(nn.Module, new_model("mixtral"))


def warnings_of_two_builds(names: Sequence[str], world: str) -> tuple[int, bool]:
    """Build twice in a new process. Return the number of warnings, and whether the text of the first is complete."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": world}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names:
            BUILDS[name]()
            BUILDS[name]()
    messages = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    text = messages[0] if messages else ""
    return len(messages), "init_process_group(" in text and "group.WORLD" in text and "WORLD_SIZE" in text


def test_a_rank_of_several_without_a_process_group_warns_once_that_it_computes_alone() -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    start_server()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as processes:
        alone = processes.submit(warnings_of_two_builds, [*BUILDS], "1")
        found = processes.map(partial(warnings_of_two_builds, world="2"), [[name] for name in BUILDS])
        assert dict(zip(BUILDS, found, strict=True)) == dict.fromkeys(BUILDS, (1, True))
        assert alone.result() == (0, False)


def build_in_a_rank() -> int:
    with warnings.catch_warnings(), init_ranks("cpu"):
        warnings.simplefilter("error")
        return MoELayer.build(CONFIG, dist.group.WORLD).dispatcher.world


def test_ranks_of_the_launcher_have_a_process_group() -> None:
    assert launch(build_in_a_rank, ranks=2, preload=("torch",)) == [2, 2]


def outside(rank: int, world: int, arg: object) -> list[str]:
    """Return the error messages of all calls with a group that contains only rank 0. Empty on rank 0."""
    group = dist.new_group([0])
    if rank == 0:
        make_dispatcher(4, group)
        return []
    calls: list[Callable[[], object]] = [
        lambda: MoELayer.build(CONFIG, group),
        lambda: make_dispatcher(4, group),
        lambda: ColumnParallelLinear(8, 8, group),
        lambda: gather_dim(torch.ones(2), group, 0),
        lambda: sum_values(torch.ones(2), group),
        *swaps(group),
    ]
    errors = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def swaps(group: dist.ProcessGroup) -> list[Callable[[], object]]:
    return [
        lambda: moe_comm.swap_moe(hugging_face_model(), group),
        lambda: moe_comm.swap_linears(hugging_face_model(), group),
        lambda: moe_comm.swap_attention(hugging_face_model(), group),
        lambda: moe_comm.swap_attention(hugging_face_model(), cp_group=group),
    ]


def test_a_group_without_this_rank_is_refused_by_name(pool2: RankPool) -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    errors = pool2.run(outside)[1]
    assert len(errors) == 9
    assert all("rank 1 is not a member of the given process group" in text for text in errors), errors
