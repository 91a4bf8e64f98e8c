"""Interleaved micro-batches in pipelines, with FSDP and with full recomputation: the bits of sequential ones."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology import ParallelConfig
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import SCHEDULES
from moe_comm.train.parallel import fsdp
from moe_comm.train.parallel.fsdp import UnitCollectives
from tests.layers.transfers import record_transfers
from tests.pool import RankPool
from tests.train.interleaving import BY_WEIGHT_4, EXPERTS_ONLY, TIED, Case, differing, train

PP2 = ParallelConfig(pp=2)
PP2_EP2 = ParallelConfig(pp=2, dp=2, ep=2)
DP2_EP2 = ParallelConfig(dp=2, ep=2)


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("1f1b", "zero_bubble", "zbv") else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEDULES
    ],
)
def test_pairs_in_a_pipeline_with_expert_parallel_stages(schedule: str, pool4: RankPool) -> None:
    strategy: ShardingMode = "zero1" if schedule in ("1f1b", "zbv") else "replicate"
    case = Case(PP2_EP2, schedule, recompute="selective", config=BY_WEIGHT_4, strategy=strategy, gradients="on")
    assert pool4.run(differing, (case, 1)) == [[]] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(PP2, "zbv", 6, TIED),
        Case(PP2, "zero_bubble", 8, dtype=torch.bfloat16),
        Case(PP2, "1f1b", 6, replace(EXPERTS_ONLY, shortcut=True)),
        Case(PP2, "interleaved_1f1b", 4, replace(EXPERTS_ONLY, parallel_block=True)),
        Case(PP2, "gpipe", 2, dtype=torch.bfloat16, overlap=None),
    ],
    ids=["tied", "split, bf16", "shortcut", "parallel block", "one pair"],
)
def test_pairs_in_a_pipeline(case: Case, pool2: RankPool) -> None:
    assert pool2.run(differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(DP2_EP2, micro_batches=6, config=TIED),
        Case(DP2_EP2, dtype=torch.bfloat16, strategy="zero1", gradients="on"),
    ],
    ids=["tied", "bf16"],
)
def test_several_pairs_without_a_pipeline(case: Case, pool2: RankPool) -> None:
    assert pool2.run(differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(DP2_EP2, recompute="full", config=BY_WEIGHT_4),
        Case(PP2, "zbv", recompute="full", config=replace(EXPERTS_ONLY, shortcut=True)),
    ],
    ids=["accumulation", "zbv, shortcut"],
)
def test_pairs_with_full_recomputation(case: Case, pool2: RankPool) -> None:
    assert pool2.run(differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(DP2_EP2, dtype=torch.bfloat16, config=TIED),
        pytest.param(Case(DP2_EP2, micro_batches=2, recompute="selective", gradients="on"), marks=pytest.mark.slow),
        Case(ParallelConfig(dp=2), recompute="full", config=BY_WEIGHT_4, dtype=torch.bfloat16, gradients="on"),
        Case(PP2, "1f1b", dtype=torch.bfloat16),
    ],
    ids=["bf16, tied", "one pair", "recompute", "1f1b"],
)
def test_pairs_with_fsdp(case: Case, pool2: RankPool) -> None:
    """In the second step, the gathered weights are in the memory of the first one."""
    assert pool2.run(differing, (replace(case, strategy="fsdp"), 2)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelConfig(dp=4, ep=2), dtype=torch.bfloat16, recompute="selective"),
        pytest.param(
            Case(ParallelConfig(tp=2, dp=2, ep=2), config=replace(EXPERTS_ONLY, shortcut=True)), marks=pytest.mark.slow
        ),
        Case(ParallelConfig(dp=4, ep=2), gradients="on", replicas=2),
        pytest.param(Case(PP2_EP2, "zbv", dtype=torch.bfloat16, recompute="selective"), marks=pytest.mark.slow),
        pytest.param(Case(PP2_EP2, "1f1b", recompute="full"), marks=pytest.mark.slow),
    ],
    ids=["edp", "tp, shortcut", "blocks", "zbv", "1f1b, recompute"],
)
def test_pairs_with_fsdp_on_four_ranks(case: Case, pool4: RankPool) -> None:
    assert pool4.run(differing, (replace(case, strategy="fsdp"), 1)) == [[]] * 4


def _overlap(rank: int, world: int, case: Case) -> tuple[list[int], list[int]]:
    """Return the number of transfers in flight at the end of each attention, and at the start of its backward."""
    with record_transfers() as log:
        train(case, True, prepare=log.watch_attention)
    assert log.in_flight == 0
    return log.counts("attention"), log.counts("attention backward")


@pytest.mark.parametrize("strategy", ["replicate", "fsdp"])
def test_attention_in_a_stage_overlaps_with_transfers_of_the_other_micro_batch(
    strategy: ShardingMode, pool4: RankPool
) -> None:
    """With FSDP, a layer ends when both micro-batches are complete, so its first attention overlaps nothing."""
    case = Case(PP2_EP2, config=EXPERTS_ONLY, strategy=strategy)
    layers = 2 if strategy == "replicate" else 1
    for forward, backward in pool4.run(_overlap, case):
        assert len(forward) == len(backward) == 4 * 2
        assert [count > 0 for count in forward] == [*[False] + [True] * (2 * layers - 1)] * (8 // (2 * layers))
        assert [count > 0 for count in backward] == [*[True] * (2 * layers - 1) + [False]] * (8 // (2 * layers))


def _collectives(rank: int, world: int, arg: tuple[Case, bool]) -> tuple[int, int]:
    """Return the numbers of gathers and reductions of a step."""
    # Private, because the number of gathers has no other effect than time.
    gather, reduce = fsdp._Gather.__call__, UnitCollectives.start_reduce
    with (
        mock.patch.object(fsdp._Gather, "__call__", autospec=True, side_effect=gather) as gathers,
        mock.patch.object(UnitCollectives, "start_reduce", autospec=True, side_effect=reduce) as reductions,
    ):
        train(*arg)
        return gathers.call_count, reductions.call_count


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fsdp_gathers_and_reduces_for_two_micro_batches_as_often_as_for_one(
    recompute: Recompute, pool2: RankPool
) -> None:
    """Each unit is gathered for forward and backward, except the root (once), and reduced once."""
    case = Case(ParallelConfig(dp=2), strategy="fsdp", dtype=torch.bfloat16, recompute=recompute)
    units = 4 + 3 * 2  # blocks, and in three of them routers and experts
    one, pair = (pool2.run(_collectives, (replace(case, micro_batches=n), n == 2)) for n in (1, 2))
    assert one == pair == [(2 * units + 1, units + 1)] * 2
