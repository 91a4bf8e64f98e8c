"""Predict a training step of ``bench train`` with the cost model of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from moe_comm.bench.calibrate.steps import imbalance
from moe_comm.bench.train.contestant import ContestantInputs
from moe_comm.bench.train.own_loop import MoeCommTraining
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology.pipeline import stages_per_rank
from moe_comm.train.auto.choose import workload
from moe_plan.machine.hardware import Cluster
from moe_plan.model.mapping import Dispatcher, Mapping, PlacedMapping
from moe_plan.step.step import StepModel


def predicted_ms(inputs: ContestantInputs, own_loop: MoeCommTraining, cluster: Cluster) -> float | None:
    """Return the predicted time of a step with the expert loads of the last step, in ms.

    None if the planner does not model the configuration: a given number of chunks, interleaved micro-batches, or
    experts that move between ranks.
    """
    config, parallel = own_loop.config, own_loop.parallel
    p = config.parallel
    moves = config.placement.kind != "fixed"
    if p.overlap_chunks not in (None, 0, "auto") or p.interleave or moves:
        return None
    shape = ModelShape.of(inputs.architecture)
    pipeline = p.schedule if parallel.pp > 1 else None
    mapping = Mapping(
        parallel,
        virtual=stages_per_rank(p.schedule, parallel.pp, p.virtual),
        micro_batch=config.data.batch // (parallel.dp * config.data.micro_batches),
        sharding=p.sharding,
        replicas=p.dp_replicate,
        recompute=config.model.recompute,
        pipeline=pipeline,
        overlap="chunks" if p.overlap_chunks else "none",
        # The other backends send each row to the rank of its expert, as all_to_all does.
        dispatcher=own_loop.backend if own_loop.backend in get_args(Dispatcher) else "all_to_all",  # type: ignore[arg-type]
    )
    rows = own_loop.reports[-1].load.slots
    load = replace(workload(config, shape), imbalance=imbalance(rows, parallel.ep))
    return StepModel(shape, PlacedMapping(mapping, cluster), load, config.data.batch).predict().seconds * 1e3
