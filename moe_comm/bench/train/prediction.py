"""Predict a training step of ``bench train`` with the cost model of the planner."""

from __future__ import annotations

from typing import get_args

from moe_comm.bench.calibrate.steps import imbalance
from moe_comm.bench.train.contestant import ContestantInputs
from moe_comm.bench.train.own_loop import MoeCommTraining
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.load import Workload
from moe_comm.plan.model.mapping import Dispatcher, Mapping, PlacedMapping
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.pipeline.schedules import stages_per_rank
from moe_comm.plan.step.step import StepModel
from moe_comm.train.sections import PayloadSection


def predicted_ms(inputs: ContestantInputs, own_loop: MoeCommTraining, cluster: Cluster) -> float | None:
    """Return the predicted time of a step with the expert loads of the last step, in ms.

    None if the planner does not model the configuration: wire dtypes, bf16 gradients, overlap in chunks.
    """
    config, parallel = own_loop.config, own_loop.parallel
    p = config.parallel
    if config.payload != PayloadSection() or p.compress or p.overlap_chunks:
        return None
    pipeline = p.schedule if parallel.pp > 1 else None
    mapping = Mapping(
        parallel,
        virtual=stages_per_rank(p.schedule, parallel.pp, p.virtual),
        micro_batch=config.data.batch // (parallel.dp * config.data.micro_batches),
        sharding=p.sharding,
        recompute=config.model.recompute,
        pipeline=pipeline,
        # The other backends send each row to the rank of its expert, as all_to_all does.
        dispatcher=own_loop.backend if own_loop.backend in get_args(Dispatcher) else "all_to_all",  # type: ignore[arg-type]
    )
    load = Workload(config.data.seq_len, "fp32", imbalance=imbalance(own_loop.reports[-1].load.slots, parallel.ep))
    model = StepModel(ModelShape.of(inputs.architecture), PlacedMapping(mapping, cluster), load, config.data.batch)
    return model.predict().seconds * 1e3
