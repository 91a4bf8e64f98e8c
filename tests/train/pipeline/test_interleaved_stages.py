"""Interleaved micro-batches in pipelines, with FSDP and with full recomputation: the bits of sequential ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_comm.layers.data_parallel import leave_gradients
from moe_comm.layers.parallel.shard import shardings_of
from moe_comm.layers.transformer.config import Recompute, TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.overlap.options import Overlap
from moe_comm.plan.pipeline.schedules import SCHEDULES
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.parallel import DataParallel, DataParallelOptions, GradientOverlap, Strategy, fsdp_collectives
from moe_comm.train.parallel.fsdp_collectives import UnitCollectives
from moe_comm.train.pipeline import ActivationShape, MicroBatch, make_runner, plan_stages
from tests.layers.tiny import BY_WEIGHT, LENGTH, TINY, own
from tests.layers.transfers import record_transfers
from tests.pool import RankPool

FOUR_LAYERS = replace(TINY, layers=4)
EXPERTS_ONLY = replace(FOUR_LAYERS, dense_layers=())
BY_WEIGHT_4 = replace(FOUR_LAYERS, moe=BY_WEIGHT.moe)
TIED = replace(FOUR_LAYERS, tie=True)
OVERLAP = Overlap(chunks=2, chunk_bytes=1)
MIXED = ("*.router.weight",)
"""Parameters that compute in fp32."""


@dataclass(frozen=True)
class Case:
    """One run. ``micro_batches`` None: the fewest that the schedule supports in pairs, at least two pairs."""

    mapping: ParallelConfig
    schedule: str = "1f1b"
    micro_batches: int | None = None
    config: TransformerConfig = FOUR_LAYERS
    recompute: Recompute = "none"
    strategy: Strategy = "replicate"
    gradients: GradientOverlap = "auto"
    dtype: torch.dtype | None = None
    overlap: Overlap | None = OVERLAP

    @property
    def number(self) -> int:
        if self.micro_batches is not None:
            return self.micro_batches
        return 8 if self.schedule == "dualpipev" else 4


def _batches(case: Case, plan: ModelPlan) -> list[MicroBatch]:
    """Return this rank's part of different micro-batches; every second one contains packed documents."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for index in range(case.number):
        ids, targets = torch.randint(TINY.vocab, (2, 4, LENGTH), generator=generator)
        documents = (torch.rand(ids.shape, generator=generator) < 0.2).long().cumsum(1) if index % 2 else None
        ids_BS, targets_BS = own(ids, plan), own(targets, plan)
        assert ids_BS is not None and targets_BS is not None
        batches.append(MicroBatch(ids_BS, targets_BS, None, own(documents, plan)))
    return batches


def _train(case: Case, interleave: bool, steps: int = 1) -> dict[str, Tensor]:
    """Return losses, gradients, router counts and auxiliary losses of the last step."""
    mesh = ParallelMesh(case.mapping)
    plan = plan_stages(case.config.layers, case.mapping.pp, case.schedule)
    stages = []
    for stage in plan.stages_of(mesh.place["pp"]):
        part = ModelPlan.of(
            mesh,
            layers=tuple(plan.layers_of(stage)),
            has_embedding=plan.is_first(stage),
            has_head=plan.is_last(stage),
            recompute=case.recompute,
            overlap=case.overlap,
            backend="all_to_all",
            dtype=torch.float32,
        )
        stages.append(Transformer(case.config, part))
        leave_gradients(stages[-1])
        initialize(stages[-1], 3, mesh.place, mesh.sizes)
        for layer in stages[-1].moe_layers():
            layer.aux_scale = 1 / case.number
    shardings = {name: sharding for stage in stages for name, sharding in shardings_of(stage).items()}
    tied = next((stage.tied_names for stage in stages if stage.tied_names), ())
    options = DataParallelOptions(
        case.strategy, case.dtype, MIXED, bucket_bytes=1 << 12, overlap=case.gradients, interleave=interleave
    )
    data_parallel = DataParallel(list(stages), shardings, mesh, options, tied)
    runner = make_runner(
        stages,
        mesh,
        plan,
        case.schedule,
        ActivationShape(case.config.hidden, case.dtype or torch.float32, case.mapping.tp),
        timeout_s=60,
        split_backward=case.recompute != "full",
        gradients=data_parallel,
        interleave=interleave,
    )
    for _ in range(steps):
        data_parallel.zero_grad()
        losses = runner.step(_batches(case, stages[0].plan), 0.01)
        data_parallel.reduce()
    results = {"losses": losses}
    for owned in data_parallel.owned():
        assert owned.value.grad is not None, owned.name
        results[owned.name] = owned.value.grad
    for stage in stages:
        for layer in stage.moe_layers():
            label, router = layer.label, layer.router
            results |= {f"{label} load": router.load_E, f"{label} dropped": layer.dropped_total}
            results |= {f"{label} {name}": value for name, value in router.losses.items()}
    runner.close()
    data_parallel.close()
    for stage in stages:
        stage.close()
    return results


def _differing(rank: int, world: int, arg: tuple[Case, int]) -> list[str]:
    case, steps = arg
    expected, actual = _train(case, False, steps), _train(case, True, steps)
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


PP2 = ParallelConfig(pp=2)
PP2_EP2 = ParallelConfig(pp=2, dp=2, ep=2)
DP2_EP2 = ParallelConfig(dp=2, ep=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pairs_in_a_pipeline_with_expert_parallel_stages(schedule: str, pool4: RankPool) -> None:
    case = Case(PP2_EP2, schedule, recompute="selective", config=BY_WEIGHT_4)
    assert pool4.run(_differing, (case, 1)) == [[]] * 4


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
    assert pool2.run(_differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_pairs_in_a_pipeline_whose_gradients_are_reduced_beside_it(strategy: Strategy, pool4: RankPool) -> None:
    case = Case(PP2_EP2, strategy=strategy, gradients="on")
    assert pool4.run(_differing, (case, 1)) == [[]] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(DP2_EP2, micro_batches=6, config=TIED),
        Case(DP2_EP2, dtype=torch.bfloat16, strategy="zero1", gradients="on"),
    ],
    ids=["tied", "bf16"],
)
def test_several_pairs_without_a_pipeline(case: Case, pool2: RankPool) -> None:
    assert pool2.run(_differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(DP2_EP2, recompute="full"),
        Case(PP2, "1f1b", recompute="full", config=BY_WEIGHT_4),
        Case(PP2, "zbv", recompute="full", config=replace(EXPERTS_ONLY, shortcut=True)),
    ],
    ids=["accumulation", "1f1b", "zbv, shortcut"],
)
def test_pairs_with_full_recomputation(case: Case, pool2: RankPool) -> None:
    assert pool2.run(_differing, (case, 1)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelConfig(dp=2)),
        Case(DP2_EP2, dtype=torch.bfloat16, config=TIED),
        Case(DP2_EP2, micro_batches=2, recompute="selective", gradients="on"),
        Case(ParallelConfig(dp=2), recompute="full", config=BY_WEIGHT_4, dtype=torch.bfloat16, gradients="on"),
        Case(PP2, "1f1b", dtype=torch.bfloat16),
    ],
    ids=["dp", "bf16, tied", "one pair", "recompute", "1f1b"],
)
def test_pairs_with_fsdp(case: Case, pool2: RankPool) -> None:
    """In the second step, the gathered weights are in the memory of the first one."""
    assert pool2.run(_differing, (replace(case, strategy="fsdp"), 2)) == [[]] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelConfig(dp=4, ep=2), dtype=torch.bfloat16, recompute="selective"),
        Case(ParallelConfig(tp=2, dp=2, ep=2), config=replace(EXPERTS_ONLY, shortcut=True)),
        Case(PP2_EP2, "zbv", dtype=torch.bfloat16, recompute="selective"),
        Case(PP2_EP2, "1f1b", recompute="full"),
    ],
    ids=["edp", "tp, shortcut", "zbv", "1f1b, recompute"],
)
def test_pairs_with_fsdp_on_four_ranks(case: Case, pool4: RankPool) -> None:
    assert pool4.run(_differing, (replace(case, strategy="fsdp"), 2)) == [[]] * 4


def _overlap(rank: int, world: int, case: Case) -> tuple[list[int], list[int]]:
    """Return the number of transfers in flight at the end of each attention, and at the start of its backward."""
    with record_transfers() as log:
        watch = Transformer.__init__

        def watching(self: Transformer, *args: Any) -> None:
            watch(self, *args)
            for block in self.layers.values():
                log.watch("attention", block.attention)  # type: ignore[arg-type]

        with mock.patch.object(Transformer, "__init__", watching):
            _train(case, True)
    assert log.in_flight == 0
    return log.counts("attention"), log.counts("attention backward")


@pytest.mark.parametrize("strategy", ["replicate", "fsdp"])
def test_attention_in_a_stage_overlaps_with_transfers_of_the_other_micro_batch(
    strategy: Strategy, pool4: RankPool
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
    gather, reduce = fsdp_collectives._Gather.__call__, UnitCollectives.start_reduce
    with (
        mock.patch.object(fsdp_collectives._Gather, "__call__", autospec=True, side_effect=gather) as gathers,
        mock.patch.object(UnitCollectives, "start_reduce", autospec=True, side_effect=reduce) as reductions,
    ):
        _train(*arg)
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
