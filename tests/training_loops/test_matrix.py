"""Training on ranks gives the parameters of one process: every loop, model, optimizer, clipping and accumulation."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm.layers.moe.load import take_loads
from tests.pool import RankPool
from tests.training_loops.loops import OPTIMIZERS, Case, check, loss_at
from tests.training_loops.models import KINDS, ep_group

LOOPS = ("own sum", "own mean", "ddp", "fsdp")
MODELS = (
    "qwen3",
    "mixtral, 5 experts",
    "gpt, 5 experts",
    "gpt, 3 experts",
    "gpt, etp 2",
    "gpt, shared expert, frozen router",
    "gpt, idle expert",
)
CLIPS = ("no clip", "torch clip", "our clip")


def every_case(kind: str, ep: int) -> list[Case]:
    """Return all combinations, except for torch's clipping with FSDP2, which raises; see test_clipping.py."""
    combinations = product(LOOPS, OPTIMIZERS, CLIPS, (1, 2))
    return [
        Case(kind, loop, ep, optimizer, clip, accumulate)
        for loop, optimizer, clip, accumulate in combinations
        if (loop, clip) != ("fsdp", "torch clip")
    ]


def some_cases(kind: str, ep: int) -> list[Case]:
    """Return each loop once, with settings that vary between loops, models and groups."""
    settings = cycle(product(OPTIMIZERS, CLIPS, (1, 2)))
    for _ in range(5 * MODELS.index(kind) + ep):
        next(settings)
    cases = []
    for loop in LOOPS:
        optimizer, clip, accumulate = next(settings)
        if (loop, clip) == ("fsdp", "torch clip"):
            clip = "our clip"
        cases.append(Case(kind, loop, ep, optimizer, clip, accumulate))
    return cases


@pytest.mark.parametrize("kind", MODELS[::2])  # with four ranks, the others have two expert-parallel ranks
def test_two_ranks_train_as_one_process(kind: str, pool2: RankPool) -> None:
    check(pool2, some_cases(kind, 2))


@pytest.mark.parametrize("kind", MODELS)
def test_four_ranks_train_as_one_process(kind: str, pool4: RankPool) -> None:
    check(pool4, some_cases(kind, 4 - 2 * (MODELS.index(kind) % 2)))


def test_fsdp_trains_lent_experts_on_four_ranks(pool4: RankPool) -> None:
    kinds = {kind: 4 - 2 * ("gpt, lent" in kind) for kind in KINDS if "lent" in kind}
    check(pool4, [Case(kind, "fsdp", ep, "adamw", "our clip", accumulate=2) for kind, ep in kinds.items()])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", MODELS)
def test_every_combination_on_two_ranks(kind: str, pool2: RankPool) -> None:
    check(pool2, every_case(kind, 2), timeout=800)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_every_combination_on_four_ranks(kind: str, ep: int, pool4: RankPool) -> None:
    check(pool4, every_case(kind, ep), timeout=800)


OPTIONS = [
    Case("gpt, 5 experts", "ddp", 2, accumulate=2, no_sync=True),
    Case("gpt, 5 experts", "ddp", 2, accumulate=2, zero=False),
    Case("gpt, 5 experts", "own mean", 2, "adamw", accumulate=2, zero=False),
    Case("gpt, 5 experts", "ddp", 2, "adamw", ddp={"gradient_as_bucket_view": True}, zero=False),
    Case("gpt, 5 experts", "ddp", 2, accumulate=2, ddp={"static_graph": True}),
    Case("gpt, 5 experts", "ddp", 2, accumulate=2, no_sync=True, ddp={"find_unused_parameters": True}),
    Case("gpt, 5 experts", "ddp", 2, hook="fp16_compress_hook", tolerance=2e-3),
    Case("gpt, 5 experts", "ddp", 2, hook="allreduce_hook"),
    Case("wrapped qwen3", "ddp", 2, accumulate=2),
    Case("wrapped qwen3", "own sum", 2),
    Case("gpt, checkpointing", "ddp", 2, ddp={"static_graph": True}),
    *(Case("gpt, balance loss", loop, 2) for loop in LOOPS),
    *(Case(kind, "fsdp", 2) for kind in ("gpt, lent experts", "qwen3, lent experts")),
    *(Case(kind, loop, 2) for kind in KINDS if "checkpointing" in kind for loop in LOOPS),
]


def test_options_of_ddp_and_activation_checkpointing_on_two_ranks(pool2: RankPool) -> None:
    check(pool2, OPTIONS)


@pytest.mark.slow
def test_options_of_ddp_and_activation_checkpointing_with_two_groups_of_two(pool4: RankPool) -> None:
    check(pool4, OPTIONS[::3])


def count_loads(rank: int, world: int, _: None) -> dict[str, Tensor]:
    """Return the loads of two forward passes under DDP, which writes rank 0's buffers over those of the other ranks."""
    model = KINDS["gpt, idle expert"].on(ep_group(world))
    ddp = DistributedDataParallel(moe_comm.prepare_ddp(model))
    for step in range(2):
        loss_at(ddp, step, rank, world)
    return {name: load.load_E for name, load in take_loads(model, dist.group.WORLD).items()}


def test_routers_count_the_tokens_of_all_ranks_under_ddp(pool2: RankPool) -> None:
    model = KINDS["gpt, idle expert"].on(None)
    for step in range(2):
        loss_at(model, step)
    expected = {name: load.load_E for name, load in take_loads(model, None).items()}
    for loads in pool2.run(count_loads, timeout=60):
        assert loads.keys() == expected.keys()
        assert all(torch.equal(load, expected[name]) for name, load in loads.items()), (loads, expected)
