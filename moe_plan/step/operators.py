"""Time of each operator of a layer on one rank, for one micro-batch: GEMMs, memory passes and transfers.

    attention   norm ─ gather(tp) ─ qkv ─ swap(cp) ─ scores ─ swap(cp) ─ out ─ scatter(tp)
    experts     norm ─ router ─ permute ─ dispatch(ep) ─ gather(etp) ─ sort ─ up ─ act ─ down ─ ... reversed
    dense       norm ─ gather(tp) ─ up ─ act ─ down ─ scatter(tp)

A swap is an all-to-all between sequence and head sharding. With b tokens of hidden size h on a rank of a
tensor-parallel group of n, each rank sends this number of elements per direction (MegaScale-MoE, arXiv 2505.11432,
section 3): attention 2 b h (n - 1), an MoE layer 2 k b h (n - 1) / n over n expert-parallel ranks by all_to_all
(``dispatching.py`` has the other dispatchers). Backward has two GEMMs for each forward GEMM and reverses every
transfer. With tp, it also gathers the input again for the weight gradients.

Routing is uniform except for ``imbalance``, the rows of the busiest rank divided by the mean.
``moe_plan.step.blocks`` computes the overlap of transfers with other operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from moe_comm.layers.transformer.shape import Block, LayerKind, ModelShape, Weight
from moe_comm.overlap.options import DEFAULT_CHUNKS
from moe_plan.machine import fused
from moe_plan.machine.collectives import NO_COST, CollectiveCost, GroupSpan
from moe_plan.machine.fused import Gemm
from moe_plan.machine.hardware import BYTES, Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import PlacedMapping, dispatch_span
from moe_plan.step.dispatching import DispatchRows, DispatchTransfer, dispatching

OperationKind = Literal["product", "memory", "transfer"]
SCORE_BYTES = 4
"""Bytes of an element of routing scores and of the loss, which use fp32."""
CAST_BYTES = BYTES["bf16"] + 2 * BYTES["fp8"]
"""Traffic per element of an fp8 operand: read, written as fp8, and written transposed for weight gradients. GEMMs on
Hopper read both operands along K (Transformer Engine's documentation, "Handling transposes")."""
IN_BF16 = ("router", "head")
"""Products that stay in bf16 with fp8 training, which covers linear layers within a transformer block
(Megatron-Bridge's performance guide)."""


@dataclass(frozen=True)
class Operation:
    """One operator in one direction, on the busiest rank.

    kind: "product" (FLOPs), "memory" (a pass over tensors) or "transfer". seconds: time without overlap. bytes: memory
    traffic, or bytes sent by a transfer. cost: of a transfer, by kind of link. weight_grad_s: part of a product in
    backward for weight gradients, which no other operator waits for. fused_share: share of a transfer that is hidden if
    it is fused with the adjacent GEMM. hidden: seconds of a transfer that overlap with other operators.
    """

    name: str
    kind: OperationKind
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    cost: CollectiveCost = NO_COST
    weight_grad_s: float = 0.0
    fused_share: float = 0.0
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that the operation adds to its pass."""
        return self.seconds - self.hidden


@dataclass(frozen=True)
class BlockOperations:
    """Operations of a block or layer, forward and backward, in order.

    input, weight: the halves of backward if a pipeline schedule splits it (``moe_plan.step.blocks``).
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    input: tuple[Operation, ...] = ()
    weight: tuple[Operation, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Operation, ...], ...]:
        """Operations of each ``moe_plan.orders.PassKind``: forward, backward, and the halves of backward."""
        return self.forward, self.backward, self.input, self.weight

    def seconds(self, kind: OperationKind | None = None) -> tuple[float, float]:
        """Return the exposed seconds of forward and backward, of one kind of operation or of all (None)."""
        forward, backward = (
            sum(operation.exposed for operation in operations if kind in (None, operation.kind))
            for operations in (self.forward, self.backward)
        )
        return forward, backward


class Operators:
    """Operators of the blocks of a model under a placed mapping."""

    def __init__(self, shape: ModelShape, placed: PlacedMapping, load: Workload) -> None:
        self.shape, self.placed, self.load = shape, placed, load
        self._gpu = placed.cluster.accelerator
        self._parallel, self._spans = placed.mapping.parallel, placed.spans
        self._size = load.size
        p = self._parallel
        self.group_tokens = placed.mapping.micro_batch * load.seq_len / p.cp
        """Tokens of a micro-batch on a tensor-parallel group."""
        self.tokens = self.group_tokens / p.tp
        """Tokens of a micro-batch on a rank, between blocks."""
        self.row_bytes = shape.hidden * self._size
        """Bytes of a token between blocks."""

    @property
    def _busiest(self) -> float:
        """Rows of the busiest rank divided by the mean.

        Where ranks share cores, a rank gets the cores of ranks that wait for it. It is slower than the mean only as far
        as its work exceeds one core.
        """
        busiest = self.load.busiest(self._parallel.ep)
        return max(min(1.0, busiest), busiest / self._gpu.shared)

    def layer(self, kind: LayerKind) -> BlockOperations:
        """Return the operations of a layer."""
        blocks = [self._block(block.name) for block, times in self.shape.layer_blocks(kind) for _ in range(times)]
        return _concatenate(blocks)

    def _block(self, name: str) -> BlockOperations:
        """Return the operations of a block, cached by the settings that they depend on."""
        mapping, p = self.placed.mapping, self._parallel
        settings: tuple[object, ...] = (p.tp, p.cp, mapping.micro_batch, mapping.overlap)
        settings += (p.ep, p.etp, mapping.dispatcher) if name == "moe" else ()
        return _cached_block(_BlockKey(name, self.shape, self.placed.cluster, self.load, settings, self))

    def attention(self) -> BlockOperations:
        shape, p, size = self.shape, self._parallel, self._size
        block, tokens = shape.attention_block, self.group_tokens
        width = shape.qkv_width
        values = shape.heads * shape.value_dim
        # Transfers can be fused with the GEMMs of qkv that read the input, counted as one.
        first_gemm = self._gemm(tokens, width / p.tp, shape.hidden)
        last_gemm = self._gemm(tokens, shape.hidden, values / p.tp)
        result = [self._norm(), self._gather("attention gather", "tp", gemm=first_gemm)]
        result += [self._product("qkv", weight, tokens, _local_shape(weight, p.tp)) for weight in block.products("qkv")]
        result.append(self._memory("rope", 2 * tokens * width / p.tp * size))
        result.append(self._swap("attention swap in", tokens * width / p.tp * size, first_gemm))
        result.append(self._scores(tokens))
        result.append(self._swap("attention swap out", tokens * values / p.tp * size, last_gemm))
        result += [
            self._product("out", weight, tokens, (weight.k / p.tp, weight.n)) for weight in block.products("out")
        ]
        result += [self._scatter("attention scatter", "tp", gemm=last_gemm), self._residual()]
        return _concatenate(result)

    def dense(self) -> BlockOperations:
        return _concatenate([self._norm(), *self._cut_block("dense", self.shape.dense_block), self._residual()])

    def experts(self) -> BlockOperations:
        """Return the operations of router, dispatch, experts and combine, and of the shared experts, sharded by tp."""
        shape, p = self.shape, self._parallel
        block = shape.moe_block
        # Ranks that hold a shard of every expert have equal work for any routing.
        routed, kept_fraction = self.tokens * shape.chosen, min(1.0, self.load.capacity or 1.0)
        dispatcher, overlapped = self.placed.mapping.dispatcher, self.placed.mapping.overlap == "all"
        span = dispatch_span(dispatcher, self.placed.cluster, p)
        # A token received by all_gather is available to all shards of its experts.
        gathers = p.etp > 1 and dispatcher != "all_gather"
        sent = DispatchRows(self.tokens, routed, kept_fraction, self._busiest, shape.hidden, self._size)
        sent = replace(sent, deterministic=self.load.deterministic, wire=self.load.wire)
        sent = sent.for_parts(1 if gathers else p.etp)
        costs = dispatching(dispatcher, shape, self.placed.cluster, span, sent, overlapped=overlapped)
        rows = routed * self._busiest * p.etp
        local = shape.experts / p.ep
        result = [self._norm()]
        result += [
            self._product("router", weight, self.tokens, (weight.k, weight.n)) for weight in block.products("router")
        ]
        scores = shape.experts + shape.zero_experts
        result.append(self._memory("routing", 6 * self.tokens * scores * SCORE_BYTES))
        result.append(self._memory("permute", costs.permute_bytes, costs.unpermute_bytes))
        up, down = block.products("experts")
        gemm_rows = (rows / local, int(max(local, 1)))
        first_gemm = self._gemm(gemm_rows[0], up.n / p.etp, up.k, gemm_rows[1])
        last_gemm = self._gemm(gemm_rows[0], down.n, down.k / p.etp, gemm_rows[1])
        # Only the transfer next to the experts' GEMMs can be fused with them.
        result.append(
            self._expert_transfer("dispatch", span, costs.dispatch, costs.combine, None if gathers else first_gemm)
        )
        if gathers:
            result.append(self._gather("expert gather", "etp", rows, gemm=first_gemm))
        sort = 2 * rows * self.row_bytes if local > 1 and p.ep * p.etp > 1 else 0.0
        receive_bytes = costs.receive_bytes + (sort if costs.sort_after_dispatch or gathers else 0.0)
        return_bytes = costs.return_bytes + (sort if costs.sort_before_combine or gathers else 0.0)
        result.append(self._memory("sort", receive_bytes, return_bytes))
        result.append(self._product("experts", up, gemm_rows[0], (up.k, up.n / p.etp), gemm_rows[1]))
        result.append(self._activation("experts", rows, up.n / p.etp, down.k / p.etp))
        result.append(self._product("experts", down, gemm_rows[0], (down.k / p.etp, down.n), gemm_rows[1]))
        result.append(self._memory("sort", return_bytes, receive_bytes))
        if gathers:
            result.append(self._scatter("expert scatter", "etp", rows, gemm=last_gemm))
        result.append(
            self._expert_transfer("combine", span, costs.combine, costs.dispatch, None if gathers else last_gemm)
        )
        result.append(self._memory("unpermute", costs.unpermute_bytes, costs.permute_bytes))
        if block.products("shared"):
            result += self._cut_block("shared", block)
        return _concatenate([*result, self._residual()])

    def head(self) -> BlockOperations:
        """Return the operations of the final norm, output projection and loss."""
        p, tokens = self._parallel, self.group_tokens
        result = [self._norm()]
        for weight in self.shape.head_block.products("head"):
            gemm = self._gemm(tokens, weight.n / p.tp, weight.k)
            result.append(self._gather("head gather", "tp", gemm=gemm))
            result.append(self._product("head", weight, tokens, (weight.k, weight.n / p.tp)))
            logits = tokens * weight.n / p.tp
            result.append(self._memory("loss", logits * (self._size + 2 * SCORE_BYTES)))
        return _concatenate(result)

    def embedding(self) -> BlockOperations:
        return self._memory("embedding", 2 * self.tokens * self.row_bytes)

    # --- kinds of operators ---

    def _product(
        self, name: str, weight: Weight, rows: float, shape: tuple[float, float], groups: int = 1
    ) -> BlockOperations:
        k, n = shape
        gpu, dtype, flops = self._gpu, self.load.dtype, 2 * rows * groups * k * n
        if dtype == "fp8" and name in IN_BF16:
            dtype = "bf16"
        # Without a capacity, experts have unequal numbers of rows.
        uneven = name == "experts" and self.load.capacity is None
        relative_rate = gpu.sustained * (gpu.grouped if uneven else 1.0)
        forward = gpu.gemm_seconds(rows, n, k, dtype, groups, uneven=uneven) / relative_rate
        weight_grad_s = gpu.gemm_seconds(k, n, rows, dtype, groups) / relative_rate
        weight_grad_s += gpu.memory_seconds(gpu.accumulate * groups * k * n * self._size)
        backward = gpu.gemm_seconds(rows, k, n, dtype, groups, uneven=uneven) / relative_rate + weight_grad_s
        full_name = f"{name} {weight.name}" if weight.name != name else name
        traffic = groups * (rows * k + k * n + rows * n) * self._size
        operations = BlockOperations(
            (Operation(full_name, "product", forward, flops, traffic),),
            (Operation(full_name, "product", backward, 2 * flops, 2 * traffic, weight_grad_s=weight_grad_s),),
        )
        if dtype != "fp8":
            return operations
        cast = self._memory("cast", CAST_BYTES * groups * rows * k, CAST_BYTES * groups * rows * n)
        return BlockOperations((*cast.forward, *operations.forward), (*cast.backward, *operations.backward))

    def _gemm(self, rows: float, n: float, k: float, groups: int = 1) -> Gemm:
        return Gemm(rows, n, k, self.load.dtype, groups)

    def _cut_block(self, name: str, block: Block) -> list[BlockOperations]:
        tp, tokens = self._parallel.tp, self.group_tokens
        weights = block.products(name)
        up = next(weight for weight in weights if weight.name == "up")
        down = next(weight for weight in weights if weight.name == "down")
        return [
            self._gather(f"{name} gather", "tp", gemm=self._gemm(tokens, up.n / tp, up.k)),
            self._product(name, up, tokens, (up.k, up.n / tp)),
            self._activation(name, tokens, up.n / tp, down.k / tp),
            self._product(name, down, tokens, (down.k / tp, down.n)),
            *(self._product(name, gate, self.tokens, (gate.k, gate.n)) for gate in weights if gate not in (up, down)),
            self._scatter(f"{name} scatter", "tp", gemm=self._gemm(tokens, down.n, down.k / tp)),
        ]

    def _activation(self, name: str, rows: float, inner: float, outer: float) -> BlockOperations:
        forward = rows * (inner + outer) * self._size
        return self._memory(f"{name} act", forward, rows * (2 * inner + outer) * self._size)

    def _scores(self, tokens: float) -> BlockOperations:
        shape, p, gpu = self.shape, self._parallel, self._gpu
        flops = shape.attention_block.per_context * self.load.per_token(shape.context) * tokens / p.tp
        backward_flops = 2.5 * flops  # five products of the same size, one of which is recomputed
        dtype = "bf16" if self.load.dtype == "fp8" else self.load.dtype
        return BlockOperations(
            (Operation("scores", "product", gpu.attention_seconds(flops, dtype) / gpu.sustained, flops),),
            (
                Operation(
                    "scores",
                    "product",
                    gpu.attention_seconds(backward_flops, dtype, backward=True) / gpu.sustained,
                    2 * flops,
                ),
            ),
        )

    def _memory(self, name: str, num_bytes: float, backward: float | None = None) -> BlockOperations:
        forward_pass, backward_pass = (
            (Operation(name, "memory", self._gpu.launch_s + self._gpu.memory_seconds(traffic), bytes=traffic),)
            if traffic
            else ()
            for traffic in (num_bytes, num_bytes if backward is None else backward)
        )
        return BlockOperations(forward_pass, backward_pass)

    def _norm(self) -> BlockOperations:
        return self._memory("norm", 2 * self.tokens * self.row_bytes, 4 * self.tokens * self.row_bytes)

    def _residual(self) -> BlockOperations:
        return self._memory("residual", 3 * self.tokens * self.row_bytes, 3 * self.tokens * self.row_bytes)

    def _gather(self, name: str, axis: str, rows: float | None = None, *, gemm: Gemm) -> BlockOperations:
        """All-gather ``rows`` over ``axis``. With tp, backward repeats it."""
        span = self._spans[axis]
        if span.ranks == 1:
            return BlockOperations((), ())
        gathered_bytes = (self.group_tokens if rows is None else rows) * self.row_bytes
        fused_share = self._fused_share(span, gemm, "gather", gathered_bytes)
        gathered = _transfer(name, self.placed.cluster.all_gather(gathered_bytes, span), fused_share)
        scattered = _transfer(name, self.placed.cluster.reduce_scatter(gathered_bytes, span), fused_share)
        again = (replace(gathered, name=f"{name} again"),) if axis == "tp" else ()
        return BlockOperations((gathered,), (*again, scattered))

    def _scatter(self, name: str, axis: str, rows: float | None = None, *, gemm: Gemm) -> BlockOperations:
        """Reduce-scatter over ``axis``. Its backward is an all-gather."""
        span = self._spans[axis]
        if span.ranks == 1:
            return BlockOperations((), ())
        gathered_bytes = (self.group_tokens if rows is None else rows) * self.row_bytes
        fused_share = self._fused_share(span, gemm, "scatter", gathered_bytes)
        scattered = _transfer(name, self.placed.cluster.reduce_scatter(gathered_bytes, span), fused_share)
        return BlockOperations(
            (scattered,), (_transfer(name, self.placed.cluster.all_gather(gathered_bytes, span), fused_share),)
        )

    def _swap(self, name: str, num_bytes: float, gemm: Gemm) -> BlockOperations:
        if self.load.lengths is not None:  # keys are exchanged instead: moe_plan.step.lengths
            return BlockOperations((), ())
        return self._all_to_all(name, self._spans["cp"], num_bytes, gemm)

    def _all_to_all(self, name: str, span: GroupSpan, num_bytes: float, gemm: Gemm | None) -> BlockOperations:
        if span.ranks == 1:
            return BlockOperations((), ())
        fused_share = 0.0 if gemm is None else self._fused_share(span, gemm, "exchange", num_bytes)
        operation = _transfer(name, self.placed.cluster.all_to_all(num_bytes, span), fused_share)
        return BlockOperations((operation,), (operation,))

    def _expert_transfer(
        self, name: str, span: GroupSpan, forward: DispatchTransfer, backward: DispatchTransfer, gemm: Gemm | None
    ) -> BlockOperations:
        """Return a transfer with another one in backward. ``gemm``: GEMM to fuse it with."""
        if span.ranks == 1:
            return BlockOperations((), ())

        def operations_of(transfer: DispatchTransfer) -> tuple[Operation, ...]:
            fused_share = 0.0
            # In chunks, the trainer's executor runs over all_to_all only.
            chunked = self.placed.mapping.overlap != "chunks" or self.placed.mapping.dispatcher == "all_to_all"
            if gemm and transfer.collective and chunked:
                fused_share = self._fused_share(span, gemm, transfer.collective, transfer.num_bytes)
            return (_transfer(name, transfer.cost, fused_share),)

        return BlockOperations(operations_of(forward), operations_of(backward))

    def _fused_share(self, span: GroupSpan, gemm: Gemm, collective: fused.CollectiveKind, num_bytes: float) -> float:
        """Return the share of a transfer that fusion with a GEMM hides; the same in backward.

        It is 0 unless overlap is "all" or "chunks". With "chunks", all chunks of the GEMM but one overlap, but none
        between ranks that share memory, because the cores that compute copy the rows. Transfers that occupy these cores
        (``Link.processor``) overlap for the rest of their time.
        """
        overlap, cluster = self.placed.mapping.overlap, self.placed.cluster
        if overlap == "chunks" and not (cluster.direct and span.hosts == 1):
            seconds = fused.transfer_seconds(cluster, span, collective, num_bytes)
            overlapping = gemm.seconds(self._gpu) * (1 - 1 / DEFAULT_CHUNKS)
            return min(1.0, overlapping / seconds) * cluster.free_share(span) if seconds else 0.0
        if overlap != "all":
            return 0.0
        transport = fused.COPIES if collective == "gather" else fused.STORES
        return fused.fused(self.placed.cluster, span, gemm, collective, num_bytes, transport).hidden


@dataclass(frozen=True)
class _BlockKey:
    """Cache key: a block and all that its operators depend on. ``operators`` are any with these settings."""

    name: str
    shape: ModelShape
    cluster: Cluster
    load: Workload
    settings: tuple[object, ...]
    operators: Operators = field(compare=False)


@lru_cache(maxsize=4096)
def _cached_block(key: _BlockKey) -> BlockOperations:
    blocks = {"attention": key.operators.attention, "dense": key.operators.dense, "moe": key.operators.experts}
    return blocks[key.name]()


def _transfer(name: str, cost: CollectiveCost, fused_share: float) -> Operation:
    sent = cost.inside + cost.between + cost.across
    return Operation(name, "transfer", cost.seconds, bytes=sent, cost=cost, fused_share=fused_share)


def _local_shape(weight: Weight, tp: int) -> tuple[float, float]:
    """Return [k, n] of a rank's shard. Columns are sharded, except for down-projections to latents."""
    return (weight.k, weight.n) if weight.name.endswith("_down") else (weight.k, weight.n / tp)


def _concatenate(parts: Iterable[BlockOperations]) -> BlockOperations:
    """Concatenate the forward operations, and the backward operations in reverse order."""
    blocks = list(parts)
    return BlockOperations(
        tuple(operation for block in blocks for operation in block.forward),
        tuple(operation for block in reversed(blocks) for operation in block.backward),
    )
