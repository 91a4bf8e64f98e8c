"""Pipeline parallelism over ``torch.distributed.pipelining``, and gradient accumulation behind the same interface.

plan = plan_stages(layers, pp, schedule)              which layers are where
modules = [build(plan.layers_of(s)) for s in plan.stages_of(mesh.place["pp"])]
runner = make_runner(modules, mesh, plan, schedule, Activations(hidden, dtype, tp))
losses = runner.step(micro_batches, scale=1 / tokens)

The two copies of a tied embedding, on the first stage and the last one, get the sum of both gradients from
``DataParallel(..., tied=...)``.
"""

from moe_comm.plan.pipeline.schedules import (
    SCHEDULES,
    Schedule,
    ScheduleName,
    check_micro_batches,
    find_schedule,
    stages_per_rank,
)
from moe_comm.plan.pipeline.stages import StagePlan, plan_stages
from moe_comm.train.pipeline.batch import Activations, MicroBatch, StageModule
from moe_comm.train.pipeline.runner import Accumulation, Pipeline, Runner, make_runner, prepare_backward

__all__ = [
    "SCHEDULES",
    "Accumulation",
    "Activations",
    "MicroBatch",
    "Pipeline",
    "Runner",
    "Schedule",
    "ScheduleName",
    "StageModule",
    "StagePlan",
    "check_micro_batches",
    "find_schedule",
    "make_runner",
    "plan_stages",
    "prepare_backward",
    "stages_per_rank",
]
