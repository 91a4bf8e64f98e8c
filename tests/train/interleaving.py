"""A training step of a transformer with interleaved or sequential micro-batches: its losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_comm.layers.data_parallel import leave_gradients
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.parallel import ShardingMode
from moe_comm.train.parallel import DataParallel, DataParallelOptions, GradientOverlap
from moe_comm.train.pipeline import ActivationShape, MicroBatch, make_runner, plan_stages
from tests.layers.tiny import BY_WEIGHT, LENGTH, TINY, own

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
    strategy: ShardingMode = "replicate"
    gradients: GradientOverlap = "auto"
    dtype: torch.dtype | None = None
    overlap: Overlap | None = OVERLAP
    backend: str = "all_to_all"
    replicas: int = 1
    timeout_s: float = 60

    @property
    def number(self) -> int:
        if self.micro_batches is not None:
            return self.micro_batches
        return 8 if self.schedule == "dualpipev" else 4


def micro_batches(number: int, plan: ModelPlan) -> list[MicroBatch]:
    """Return this rank's part of different micro-batches; every second one contains packed documents."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for index in range(number):
        ids, targets = torch.randint(TINY.vocab, (2, 4, LENGTH), generator=generator)
        documents = (torch.rand(ids.shape, generator=generator) < 0.2).long().cumsum(1) if index % 2 else None
        ids_BS, targets_BS = own(ids, plan), own(targets, plan)
        assert ids_BS is not None and targets_BS is not None
        batches.append(MicroBatch(ids_BS, targets_BS, None, own(documents, plan)))
    return batches


def train(
    case: Case, interleave: bool, steps: int = 1, prepare: Callable[[Transformer], None] = lambda stage: None
) -> dict[str, Tensor]:
    """Return losses, gradients, router counts and auxiliary losses of the last step.

    prepare: called with each stage before the first step.
    """
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
            backend=case.backend,
            dtype=torch.float32,
        )
        stages.append(Transformer(case.config, part))
        prepare(stages[-1])
        leave_gradients(stages[-1])
        initialize(stages[-1], 3, mesh.place, mesh.sizes)
        for layer in stages[-1].moe_layers():
            layer.aux_scale = 1 / case.number
    shardings = {name: sharding for stage in stages for name, sharding in shardings_of(stage).items()}
    tied = next((stage.tied_names for stage in stages if stage.tied_names), ())
    options = DataParallelOptions(
        sharding=case.strategy,
        overlap_gradients=case.gradients,
        interleave=interleave,
        dp_replicate=case.replicas,
    )
    data_parallel = DataParallel(
        list(stages), shardings, mesh, options, tied, dtype=case.dtype, full_precision=MIXED, bucket_bytes=1 << 12
    )
    runner = make_runner(
        stages,
        mesh,
        plan,
        case.schedule,
        ActivationShape(case.config.hidden, case.dtype or torch.float32, case.mapping.tp),
        data_parallel,
        interleave=interleave,
        split_backward=case.recompute != "full",
        timeout_s=case.timeout_s,
    )
    for _ in range(steps):
        data_parallel.zero_grad()
        losses = runner.step(micro_batches(case.number, stages[0].plan), 0.01)
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


def differing(rank: int, world: int, arg: tuple[Case, int]) -> list[str]:
    """Return the names of results of a run in pairs that differ from those of sequential micro-batches."""
    case, steps = arg
    expected, actual = train(case, False, steps), train(case, True, steps)
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]
