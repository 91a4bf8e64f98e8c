"""Pipeline parallelism with ``torch.distributed.pipelining``, and gradient accumulation with the same interface.

plan = plan_stages(layers, pp, schedule)              layers of each stage
modules = [build(plan.layers_of(s)) for s in plan.stages_of(mesh.place["pp"])]
runner = make_runner(modules, mesh, plan, schedule, ActivationShape(hidden, dtype, tp))
losses = runner.step(micro_batches, scale=1 / tokens)

``DataParallel(..., tied=...)`` sums the gradients of the two copies of a tied embedding on the first and last stage.
"""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
