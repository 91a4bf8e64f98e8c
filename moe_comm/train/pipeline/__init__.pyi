from moe_comm.topology.pipeline import (
    SCHEDULES as SCHEDULES,
    PipelineSchedule as PipelineSchedule,
    ScheduleName as ScheduleName,
    StagePlan as StagePlan,
    check_micro_batches as check_micro_batches,
    find_schedule as find_schedule,
    plan_stages as plan_stages,
    stages_per_rank as stages_per_rank,
)
from moe_comm.train.pipeline.batch import (
    ActivationShape as ActivationShape,
    MicroBatch as MicroBatch,
)
from moe_comm.train.pipeline.runner import (
    Accumulation as Accumulation,
    Pipeline as Pipeline,
    Runner as Runner,
    make_runner as make_runner,
    prepare_backward as prepare_backward,
)
