"""Memory of each pipeline position for a model, a mapping and a workload. It is fast enough for a search.

    weights      in the compute dtype; with fsdp the gathered ones: the root's and those of the two largest layers
    gradients    fp32; with fsdp only the rank's shard if no gradients are accumulated
    optimizer    fp32 masters and state, sharded over tp x cp x dp (experts: edp) with zero1 and fsdp, or over the ranks
                 of one of several replicas
    activations  saved by micro-batches in flight, recomputed by the largest layer, and the loss
    buffers      of one running layer: see ``_Buffers``; and gradients between the halves of a split backward pass:
                 see ``activations.split_gradient_bytes``

``fixed_memory`` computes the first three, ``activations`` the fourth, for the fullest rank of a position. Experts are
assumed to have the rows of the busiest rank (``Workload.busiest``). A micro-batch is in flight between its forward and
its backward pass; the count is taken at the moment when the stages of a rank together hold the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.lengths.solve import CAPACITY
from moe_comm.layers.transformer.shape import MASTER, ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.topology.pipeline import plan_stages
from moe_plan.model.activations import ActivationMemory, split_gradient_bytes
from moe_plan.model.fixed_memory import (
    FixedMemory,
    FixedMemoryModel,
    Optimizer,
    StageContents,
    fixed_of,
    fixed_parts,
)
from moe_plan.model.load import Workload
from moe_plan.model.mapping import SUM_BYTES, Mapping, remote_copies, sends_sums
from moe_plan.orders import InFlight, in_flight_peaks


@dataclass(frozen=True)
class MemoryPolicy:
    """Memory-related choices of a run that are not part of its mapping.

    reshard: fsdp releases weights and reduce-scatters gradients after each pass (ZeRO-3). The bundled trainer keeps
    the gradients of several micro-batches and the weights of pipeline stages until the last pass of the step.
    cut_shared: tensor-parallel ranks shard the shared experts, as in Megatron. In the bundled trainer each rank holds
    all shared experts and runs them on its own tokens.
    outputs: experts save their outputs for backward, as in Megatron.
    offload: bytes of memory for offloaded optimizer state and masters. None: they are in memory.
    activations: bytes of memory for offloaded activations. None: they are in memory.
    weights: shards of weights, gradients and optimizer state of fsdp are in the host's memory, which updates them.
    offload_rate: bytes per second that a rank can read and write of offloaded data, together.
    """

    optimizer: Optimizer = "adamw"
    momentum: bool = False
    reshard: bool = False
    cut_shared: bool = False
    outputs: bool = False
    offload: int | None = None
    activations: int | None = None
    weights: bool = False
    offload_rate: float = math.inf


DEFAULT_POLICY = MemoryPolicy()


@dataclass(frozen=True)
class StoredActivations:
    """Offloaded activations of a rank in bytes: the most at a time, those of a step, and those of one layer."""

    most: float
    step: float
    layer: float

    def saved(self, budget: int) -> float:
        """Return how much less memory they take with a budget. The running layer's are in memory in addition."""
        return max(0.0, self.most - budget - self.layer)

    def moved(self, budget: int) -> float:
        """Return the bytes that a step writes and reads. The last ones of a forward pass stay in the budget."""
        return 2 * self.step * max(0.0, 1 - budget / self.most) if self.most else 0.0


@dataclass(frozen=True)
class PositionMemory:
    """Bytes on the fullest rank of a pipeline position. ``parameters`` counts elements.

    ``at_update`` bytes (gradient sums) are allocated only during the update, after activations and buffers are freed.
    ``host`` bytes are in the host's memory.
    """

    position: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    at_update: int
    host: int = 0

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.buffers, self.at_update)

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        terms = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "activations", "buffers")}
        if self.at_update > self.activations + self.buffers:
            terms["at_update"] = self.at_update
        return max(terms, key=lambda name: terms[name])


def memory(
    shape: ModelShape,
    mapping: Mapping,
    load: Workload,
    global_batch: int,
    policy: MemoryPolicy = DEFAULT_POLICY,
    host: int | None = None,
) -> tuple[PositionMemory, ...]:
    """Return the memory of the ranks of each pipeline position, in order of positions.

    Args:
        global_batch: sequences of a step.
        policy: choices that are not part of the mapping.
        host: accelerators of a host. None: all ranks are on one host.

    Raises:
        ConfigError: the batch is not divisible, or the schedule does not support the stages or micro-batches.
    """
    parallel, micro_batches = mapping.parallel, mapping.micro_batches(global_batch)
    schedule = mapping.schedule
    stages_of = _layout(shape.layers, shape.dense_layers, parallel.pp, schedule, mapping.virtual)
    split = mapping.splits
    peaks_of = in_flight_peaks(schedule, parallel.pp, mapping.virtual, micro_batches)
    size = load.size
    # Parameters, gradients and optimizer state of one layer of each kind, the embedding and the head.
    sharding = mapping.sharding if parallel.world > 1 or policy.weights else "replicate"
    if policy.weights and sharding != "fsdp":
        raise ConfigError(f"offloaded weights require sharding fsdp; got {sharding}")
    lends = load.loads is not None and load.loads.placed(parallel.ep).kind == "balance"
    if lends and sharding == "fsdp":
        raise ConfigError("lent experts are whole on their ranks, so sharding must be replicate or zero1; got fsdp")
    partial = sharding == "fsdp" and (policy.reshard or (parallel.pp == 1 and micro_batches == 1))
    gathered = sharding != "fsdp" or (parallel.pp > 1 and (split or not policy.reshard))
    optimizer, momentum = policy.optimizer, policy.momentum
    memory_model = FixedMemoryModel(
        parallel, sharding, size, optimizer, momentum, partial, policy.cut_shared, mapping.replicas
    )
    fixed = fixed_parts(shape, memory_model)
    # Bytes per token of activations, of the loss and of the gradients between the halves of a split backward pass.
    tokens = _tokens(mapping, load)
    estimate = _estimate(
        shape,
        size,
        parallel.tp,
        mapping.recompute,
        rows=load.busiest(parallel.ep),
        etp=parallel.etp,
        outputs=policy.outputs,
    )
    halfway = split_gradient_bytes(estimate, mapping.fuses or mapping.overlap == "chunks") if split else (0.0, 0.0)
    losses = estimate.loss(math.ceil(tokens)) * (micro_batches if schedule == "gpipe" and parallel.pp > 1 else 1)
    buffers = _Buffers.of(shape, mapping, load, size, host)
    copy_bytes, gradient_bytes = _lent_bytes(shape, load, parallel) if lends else (0, 0)
    by_contents: dict[tuple[StageContents, int], tuple[FixedMemory, float, int]] = {}
    memories = []
    for position, ((parts, stages), peaks) in enumerate(zip(stages_of, peaks_of, strict=True)):
        # Most positions have the same layers, so compute what depends on the layers once.
        if (parts, len(stages)) not in by_contents:
            layers = (parts.dense, parts.moe)
            largest = max((part.params for part, count in zip(fixed, layers, strict=False) if count), default=0)
            fixed_memory = fixed_of(parts, fixed, gathered).offloaded(policy.offload)
            by_contents[parts, len(stages)] = (
                fixed_memory.on_host(partial) if policy.weights else fixed_memory,
                parts.last * losses + tokens * estimate.recomputed(*layers),
                round(buffers.at(parts, len(stages)) + (MASTER * largest if partial else 0)),
            )
        fixed_memory, base_activations, layer_buffers = by_contents[parts, len(stages)]
        activations, between_halves = peak_saved(estimate, stages, peaks, halfway)
        freed = 0.0
        if policy.activations is not None:
            freed = stored_activations(estimate, stages, peaks, tokens, micro_batches).saved(policy.activations)
        memories.append(
            PositionMemory(
                position,
                fixed_memory.params,
                fixed_memory.weights + parts.moe * copy_bytes,
                fixed_memory.gradients + (gradient_bytes if parts.moe else 0),
                fixed_memory.optimizer,
                round(base_activations + tokens * activations - freed),
                layer_buffers + round(tokens * between_halves),
                fixed_memory.at_update,
                fixed_memory.host,
            )
        )
    return tuple(memories)


def _lent_bytes(shape: ModelShape, load: Workload, parallel: ParallelConfig) -> tuple[int, int]:
    """Return the bytes of slots for copies in each layer, and of the gradients that a call of one layer returns.

    A rank has as many slots as experts. Ranks that read weights in place have none.
    """
    assert load.loads is not None and load.loads.lending is not None
    homes = -(-shape.experts // parallel.ep)
    elements = homes * shape.parameters("moe")["experts"] // (shape.experts * parallel.etp)
    in_place = load.loads.lending.in_place(parallel.ep)
    return 0 if in_place else load.size * elements, 2 * MASTER * elements


def peak_saved(
    estimate: ActivationMemory, stages: Sequence[StageContents], peaks: Sequence[InFlight], halfway: tuple[float, float]
) -> tuple[float, float]:
    """Return the peak bytes per token on a rank with these stages.

    The first number counts activations saved by forward passes. The second counts gradients saved by the first halves
    of split backward passes, given ``halfway``: their bytes for a dense layer and for an MoE layer.
    """
    saved = [estimate.saved(dense, moe, last) for dense, moe, _, last in stages]
    between = [dense * halfway[0] + moe * halfway[1] for dense, moe, _, _ in stages]
    return max(((sum(map(mul, n, saved)), sum(map(mul, late, between))) for n, late in peaks), key=sum)


def stored_activations(
    estimate: ActivationMemory, stages: Sequence[StageContents], peaks: Sequence[InFlight], tokens: float, count: int
) -> StoredActivations:
    """Return the activations of the layers of a rank with these stages, for ``count`` micro-batches of ``tokens``."""
    layers = [stage._replace(last=0) for stage in stages]
    most, _ = peak_saved(estimate, layers, peaks, (0.0, 0.0))
    largest = max(
        (estimate.saved(min(dense, 1), 0, 0), estimate.saved(0, min(moe, 1), 0)) for dense, moe, _, _ in layers
    )
    passes = sum(estimate.saved(dense, moe, 0) for dense, moe, _, _ in layers)
    return StoredActivations(tokens * most, tokens * passes * count, tokens * max(largest))


def activations_moved(
    shape: ModelShape, mapping: Mapping, load: Workload, global_batch: int, policy: MemoryPolicy, position: int
) -> float:
    """Return the bytes of offloaded activations that a rank of a pipeline position moves in a step."""
    if policy.activations is None:
        return 0.0
    micro_batches, p = mapping.micro_batches(global_batch), mapping.parallel
    _, stages = _layout(shape.layers, shape.dense_layers, p.pp, mapping.schedule, mapping.virtual)[position]
    peaks = in_flight_peaks(mapping.schedule, p.pp, mapping.virtual, micro_batches)[position]
    estimate = _estimate(
        shape, load.size, p.tp, mapping.recompute, rows=load.busiest(p.ep), etp=p.etp, outputs=policy.outputs
    )
    stored = stored_activations(estimate, stages, peaks, _tokens(mapping, load), micro_batches)
    return stored.moved(policy.activations)


def fullest(memories: Sequence[PositionMemory]) -> PositionMemory:
    """Return the pipeline position whose ranks need the most memory."""
    return max(memories, key=lambda position: position.total)


@lru_cache(maxsize=4096)
def _layout(
    layers: int, dense: int, pp: int, schedule: str, virtual: int
) -> tuple[tuple[StageContents, tuple[StageContents, ...]], ...]:
    """Return the contents of each position: the total over its stages, and each stage."""
    plan = plan_stages(layers, pp, schedule, virtual=virtual)
    result = []
    for rank in range(pp):
        stages = []
        for stage in plan.stages_of(rank):
            ids = plan.layers_of(stage)
            dense_layers = sum(layer < dense for layer in ids)
            first, last = int(plan.is_first(stage)), int(plan.is_last(stage))
            stages.append(StageContents(dense_layers, len(ids) - dense_layers, first, last))
        result.append((StageContents(*map(sum, zip(*stages, strict=True))), tuple(stages)))
    return tuple(result)


# ---- activations and buffers


def _tokens(mapping: Mapping, load: Workload) -> float:
    """Return the tokens of a micro-batch on the rank with the most."""
    share = CAPACITY if mapping.lengths == "balanced" else 1
    return share * mapping.micro_batch * load.seq_len / (mapping.parallel.cp * mapping.parallel.tp)


_estimate = lru_cache(maxsize=4096)(ActivationMemory)


@dataclass(frozen=True)
class _Buffers:
    """Bytes of buffers that are allocated while one layer runs.

    dispatch: sent and received rows (``_dispatched``); 0 if the rank has all experts. moe, dense: gradients of a
    feed-forward block: of its input, output and intermediate activations. gathered: input of a block gathered over tp,
    and its gradient. swapped: queries, keys and values before and after the all-to-all over cp. hop: activations of a
    micro-batch sent to one neighbour in the pipeline, and the received gradients.
    """

    dispatch: float
    moe: float
    dense: float
    gathered: float
    swapped: float
    hop: float

    @classmethod
    def of(cls, shape: ModelShape, mapping: Mapping, load: Workload, size: int, host: int | None) -> _Buffers:
        p, tokens = mapping.parallel, _tokens(mapping, load)
        row = shape.hidden * size
        rows = tokens * shape.chosen * load.busiest(p.ep) * p.etp
        inner = 3 if shape.gated else 2
        dense = tokens * ((3 if shape.dense_gated else 2) * shape.dense_ffn * size + 2 * p.tp * row)
        return cls(
            dispatch=_dispatched(shape, mapping, load, size, host) * tokens * row if p.ep * p.etp > 1 else 0.0,
            moe=rows * (2 * row + inner * shape.ffn / p.etp * size),
            dense=dense if shape.dense_ffn else 0.0,
            gathered=2 * tokens * p.tp * row if p.tp > 1 else 0.0,
            swapped=2 * tokens * shape.qkv_width * size if p.cp > 1 else 0.0,
            hop=2 * tokens * row,
        )

    def at(self, parts: StageContents, stages: int) -> float:
        """Return the bytes of the largest layer of a position, and of transfers to and from its ``stages`` stages."""
        layer = max(self.dispatch + self.moe if parts.moe else 0.0, self.dense if parts.dense else 0.0, self.swapped)
        return self.gathered + layer + self.hop * (2 * stages - parts.first - parts.last)


def _dispatched(shape: ModelShape, mapping: Mapping, load: Workload, size: int, host: int | None) -> float:
    """Return buffer rows per token of a rank, in addition to the experts' rows, of dispatch and combine together.

    all_to_all: sent and received rows, twice. all_gather: the tokens of all ranks and the rows selected from them; for
    combine, sent and received rows, or partial sums of both in fp32. hierarchical: sent and received rows inside the
    host, sorted received rows, and copies from other hosts, twice.
    """
    p, kept_fraction = mapping.parallel, min(1.0, load.capacity or 1.0)
    ranks = p.ep * p.etp
    sent, rows = (shape.chosen * share * p.etp for share in (kept_fraction, load.busiest(p.ep)))
    if mapping.dispatcher == "all_gather":
        sums = sends_sums("all_gather", shape, p.ep, size, deterministic=load.deterministic)
        return ranks + rows + (SUM_BYTES / size * (ranks + rows) if sums else sent + rows)
    hosts = 1 if host is None else -(-ranks // host)
    if mapping.dispatcher == "hierarchical" and hosts > 1:
        return 2 * (sent + 2 * rows + remote_copies(shape, hosts, kept_fraction))
    return 2 * (sent + rows)
