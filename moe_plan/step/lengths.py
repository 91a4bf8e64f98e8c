"""Work of documents in time on a described machine, and what lengths add to a step.

A token costs more time per FLOP than a pair of a query and a key: its products are small, and its norms, activations
and copies have almost no FLOPs. The description of the machine has the rates (``moe-comm plan --calibrate``), and the
planner's operators the time of a layer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add

from moe_comm.layers.transformer.lengths.cost import SCORES_BACKWARD, LengthCost
from moe_comm.layers.transformer.lengths.loads import balanced_loads, micro_batches, static_loads
from moe_comm.layers.transformer.lengths.solve import group_sizes
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_plan.machine.hardware import Cluster, item_bytes
from moe_plan.model.lengths import DocumentLengths
from moe_plan.model.load import Workload
from moe_plan.model.mapping import LengthMode, Mapping, PlacedMapping
from moe_plan.step.blocks import LINKS, links
from moe_plan.step.operators import BlockOperations, Operators

UNIT_S = 1e-15
"""Seconds of a unit of work."""
LAUNCHES, UNEVEN = "document launches", "uneven lengths"
"""Keys of a step's breakdown that are no transfers: starts of documents, and work of the slowest rank over the mean."""


@dataclass(frozen=True)
class DocumentCost:
    """What the documents of a micro-batch add to a step in which all ranks of dp x cp have the mean work.

    Attributes:
        slowest: work of the slowest rank over the mean with static lengths, as a dry run reports it. Transfers, and
            experts of other ranks, are not included.
        idle: share of the slowest rank's time, with transfers, in which the others are idle on average.
        launch_s: mean seconds of a rank to start the attention of each document.
        uneven_s: seconds that the slowest rank takes longer than the mean.
        keys_s: seconds that transfers of keys add to the slowest rank.
        sent: bytes of keys and of their gradients that a rank sends, by kind of link; mean over the ranks.
    """

    slowest: float
    idle: float
    launch_s: float
    uneven_s: float
    keys_s: float
    sent: dict[str, float]


def document_cost(shape: ModelShape, placed: PlacedMapping, load: Workload) -> DocumentCost:
    """Predict the first micro-batches of ``load.lengths``, with the static or balanced lengths of the mapping.

    Recomputation is not included.
    """
    assert load.lengths is not None
    mapping, p = placed.mapping, placed.mapping.parallel
    same = ParallelConfig(p.tp, p.cp, p.dp, ep=1 if p.ep == 1 else p.dp * p.cp * p.tp)
    key = _DocumentKey(shape, placed.cluster, load.lengths, load.seq_len, load.dtype, mapping.micro_batch, same)
    return _document_cost(key, mapping.lengths)


@dataclass(frozen=True)
class _DocumentKey:
    """All that the cost of documents depends on, besides the setting of lengths."""

    shape: ModelShape
    cluster: Cluster
    lengths: DocumentLengths
    seq_len: int
    dtype: str
    micro_batch: int
    parallel: ParallelConfig


@lru_cache(maxsize=1024)
def _document_cost(key: _DocumentKey, mode: LengthMode) -> DocumentCost:
    p, cluster, size = key.parallel, key.cluster, key.micro_batch * key.parallel.dp
    world = p.dp * p.cp
    flops = LengthCost.of(key.shape, p.ep == 1, item_bytes(key.dtype))
    tokens = max(size * key.seq_len // world, 1)
    cost = measured_cost(flops, key.shape, cluster, key.dtype, tokens, p)
    shared = max(1.0, cluster.accelerator.shared)
    mean = work = slowest = spent = launches = uneven = keys = 0.0
    received: Counter[int] = Counter()
    samples = micro_batches(key.lengths.sequences, size)
    for sequences in samples:
        by_rank = [sequences[at : at + key.micro_batch] for at in range(0, size, key.micro_batch)]
        static = static_loads(by_rank, key.seq_len, p.cp, cost)
        loads = balanced_loads(sequences, world, cost) if mode == "balanced" else static
        mean += sum(static.work) / world
        most, total = max(loads.work), sum(loads.work)
        documents = sum(cost.work(length) - cost.document for sequence in sequences for length in sequence)
        transferred = max(map(add, loads.work, loads.exposed))
        work, slowest, spent = work + total / world, slowest + most, spent + transferred
        launches += (total - documents) / world
        uneven += max(0, most / shared - total / world)  # ranks that wait lend their core
        keys += transferred - most
        received.update(dict(loads.keys))
    sent = dict.fromkeys(LINKS, 0.0)
    for ranks, number in received.items():
        group = cluster.span(range(0, ranks * p.tp, p.tp))
        per_rank = flops.key_bytes * number / world / len(samples)
        for link, num_bytes in links(cluster.all_gather(per_rank * ranks / (ranks - 1), group)).items():
            sent[link] += num_bytes / p.tp
    seconds = UNIT_S / p.tp / len(samples)
    return DocumentCost(slowest / mean, 1 - work / spent, launches * seconds, uneven * seconds, keys * seconds, sent)


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
