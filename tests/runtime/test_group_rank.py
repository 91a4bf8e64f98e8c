"""Invalid process groups: no group although WORLD_SIZE is larger than 1, and a group without this rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import gather_dim, sum_values
from moe_comm.layers.parallel.linear import ColumnParallelLinear
from tests.pool import RankPool

CONFIG = MoEConfig(hidden=8, ffn=8, router=RouterConfig(num_experts=4, top_k=2))

# Script: for WORLD_SIZE 1 and 2, run each build function twice in a forked process, which has not issued any warning
# yet, and print the number of warnings and whether their text is complete.
UNDISTRIBUTED = """
import itertools, os, sys, warnings
import moe_comm
from moe_comm.layers.parallel.linear import ColumnParallelLinear
from tests.integrations.models import new_model
from tests.layers.tiny import TINY
from tests.runtime.test_group_rank import CONFIG

def model():
    return new_model("mixtral")

builds = {
    "MoELayer": lambda: moe_comm.MoELayer.build(CONFIG),
    "make_dispatcher": lambda: moe_comm.make_dispatcher(4),
    "swap_moe": lambda: moe_comm.swap_moe(model()),
    "swap_linears": lambda: moe_comm.swap_linears(model()),
    "swap_attention": lambda: moe_comm.swap_attention(model()),
    "ColumnParallelLinear": lambda: ColumnParallelLinear(8, 8),
    "Transformer": lambda: moe_comm.Transformer(TINY),
}
for world, (name, build) in itertools.product("12", builds.items()):
    if not os.fork():
        os.environ["WORLD_SIZE"] = world
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build()
            build()
        messages = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
        text = messages[0] if messages else ""
        good = "init_process_group(" in text and "group.WORLD" in text and "WORLD_SIZE" in text
        print(world, name, len(messages), good, flush=True)
        os._exit(0)
    os.wait()
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_rank_of_several_without_a_process_group_warns_once_that_it_computes_alone() -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    process = run(["-c", UNDISTRIBUTED], RANK="0")
    lines = [line.split(" ") for line in process.stdout.splitlines()]
    assert len(lines) == 14, process.stderr
    for world, *_, warnings, good in lines:
        assert (warnings, good) == {"1": ("0", "False"), "2": ("1", "True")}[world], lines


def test_ranks_of_the_launcher_have_a_process_group() -> None:
    small = ["--tokens", "4", "--hidden", "8", "--ffn", "8", "--experts", "4", "--top-k", "2"]
    strict = "error:this is one of:RuntimeWarning"
    process = run(["-m", "moe_comm", "check-grads", "--ranks", "2", *small], PYTHONWARNINGS=strict)
    assert process.returncode == 0, process.stderr


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
    from moe_comm import swap_attention, swap_linears, swap_moe
    from tests.integrations.models import new_model

    def model() -> nn.Module:
        return cast(nn.Module, new_model("mixtral"))

    return [
        lambda: swap_moe(model(), group),
        lambda: swap_linears(model(), group),
        lambda: swap_attention(model(), group),
        lambda: swap_attention(model(), cp_group=group),
    ]


def test_a_group_without_this_rank_is_refused_by_name(pool2: RankPool) -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    errors = pool2.run(outside)[1]
    assert len(errors) == 9
    assert all("rank 1 is not a member of the given process group" in text for text in errors), errors
