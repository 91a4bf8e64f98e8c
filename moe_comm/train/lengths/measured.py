"""Work of documents in time on a described machine, instead of FLOPs.

A token costs more time per FLOP than a pair of a query and a key: its products are small, and its norms, activations
and copies have almost no FLOPs. The description of the machine has the rates (``moe-comm plan --calibrate``), and the
planner's operators the time of a layer.
"""

from __future__ import annotations

from dataclasses import replace

from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.train.lengths.cost import SCORES_BACKWARD, LengthCost
from moe_comm.train.lengths.solve import group_sizes
from moe_plan.machine.hardware import Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.operators import BlockOperations, Operators

UNIT_S = 1e-15
"""Seconds of a unit of work."""


def measured_cost(
    flops: LengthCost, shape: ModelShape, cluster: Cluster, dtype: str, tokens: int, mapping: ParallelConfig
) -> LengthCost:
    """Return the cost ``flops`` in units of ``UNIT_S`` on accelerators of ``cluster``.

    Args:
        dtype: of the planner, "fp32" or "bf16".
        tokens: tokens of a rank in a micro-batch.
    """
    experts_stay = mapping.ep == 1
    alone = Cluster(cluster.accelerator, 1, 1, cluster.inside, cluster.between)
    placed = PlacedMapping(Mapping(ParallelConfig(), micro_batch=1), alone)
    operators = Operators(shape, placed, Workload(tokens, dtype))
    blocks: list[tuple[BlockOperations, int]] = [(operators.embedding(), 1), (operators.head(), 1)]
    if shape.dense_layers:
        blocks.append((operators.layer("dense"), shape.dense_layers))
    if shape.moe_layers:
        blocks.append((operators.layer("moe"), shape.moe_layers))
    scores_s = score_flops = token_s = attentions = 0.0
    for block, times in blocks:
        for operation in (*block.forward, *block.backward):
            if operation.name == "scores":
                scores_s += times * operation.seconds
            elif operation.kind != "transfer" and (experts_stay or not operation.name.startswith("experts")):
                token_s += times * operation.seconds
        forward = [operation for operation in block.forward if operation.name == "scores"]
        score_flops += times * sum(operation.flops for operation in forward) * (1 + SCORES_BACKWARD)
        attentions += times * len(forward)
    world = mapping.cp * mapping.dp
    transfers = []
    for size in group_sizes(world)[1:]:
        group = cluster.span(range(0, size * mapping.tp, mapping.tp))
        cost = cluster.all_gather(flops.key_bytes * tokens * world, group)  # of many tokens: latencies are in document
        transfers.append((size, round((cost.seconds - cost.latency_s) / (tokens * world) / UNIT_S)))
    return replace(
        flops,
        transfers=tuple(transfers),
        pair=max(1, round(flops.pair * scores_s / score_flops / UNIT_S)),
        token=round(token_s / tokens / UNIT_S),
        document=round(2 * attentions * cluster.accelerator.launch_s / UNIT_S),
    )
