"""What each operator of a layer takes on one rank, for one micro-batch: products, passes over memory, transfers.

    attention   norm ─ gather(tp) ─ qkv ─ swap(cp) ─ scores ─ swap(cp) ─ out ─ scatter(tp)
    experts     norm ─ router ─ permute ─ dispatch(ep) ─ gather(etp) ─ sort ─ up ─ act ─ down ─ ... the same way back
    dense       norm ─ gather(tp) ─ up ─ act ─ down ─ scatter(tp)

With b tokens of hidden size h on a rank of a tensor-parallel group of n, in elements sent by each rank and direction
(MegaScale-MoE, arXiv 2505.11432, section 3): attention 2 b h (n - 1), an MoE layer 2 k b h (n - 1) / n over n
expert-parallel ranks by all_to_all (``dispatching.py`` has the other dispatchers). Backward has two products for each,
and every transfer the other way round; with tp the input is gathered once more for the weights' gradient.

Routing is in equal parts but for ``imbalance``: what the busiest rank has over the mean. What of a transfer goes on
beside or inside products is ``moe_comm.plan.step.overlap_model``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from moe_comm.plan.machine import fused
from moe_comm.plan.machine.collectives import NOTHING, Moved, Span
from moe_comm.plan.machine.fused import Product
from moe_comm.plan.machine.hardware import BYTES, Cluster
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Place, dispatch_span
from moe_comm.plan.model.matrices import Block, Weight
from moe_comm.plan.model.shape import LayerKind, ModelShape
from moe_comm.plan.step.dispatching import Rows, Transfer, dispatching

Kind = Literal["product", "memory", "transfer"]
SCORE_BYTES = 4
"""Routing and the loss are in fp32."""
CAST_BYTES = BYTES["bf16"] + 2 * BYTES["fp8"]
"""Of an element that goes into an fp8 product: read, and written as the product takes it and transposed, for weights'
gradients: products on Hopper read both operands along K (Transformer Engine's documentation, "Handling transposes")."""
IN_BF16 = ("router", "head")
"""Products that stay in bf16 where others are in fp8, which is for linear layers within a transformer block
(Megatron-Bridge's performance guide)."""


@dataclass(frozen=True)
class Operation:
    """One operator in one direction, on the busiest rank. seconds: by itself, with nothing beside it.

    kind: "product" (FLOPs), "memory" (a pass over tensors), "transfer". bytes: read and written, or of a transfer
    those that the rank sends (``moved``: over which links). later: of a product's backward, the seconds for weights'
    gradients, which nothing waits for. inside: the share of a transfer that goes on inside the product before or after
    it, if the two are fused. hidden: seconds of a transfer that others do not see.
    """

    name: str
    kind: Kind
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    moved: Moved = NOTHING
    later: float = 0.0
    inside: float = 0.0
    hidden: float = 0.0

    @property
    def shown(self) -> float:
        """Seconds that it adds to its pass."""
        return self.seconds - self.hidden


@dataclass(frozen=True)
class Pass:
    """The operations of one block or layer, forward and backward, in order. input, weight: of the halves of backward,
    where a pipeline's schedule splits it (``moe_comm.plan.step.split_backward``)."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    input: tuple[Operation, ...] = ()
    weight: tuple[Operation, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[Operation, ...], ...]:
        """By ``moe_comm.plan.pipeline.orders.PassKind``."""
        return self.forward, self.backward, self.input, self.weight

    def seconds(self, kind: Kind | None = None) -> tuple[float, float]:
        """That forward and backward take, without what is hidden; of one kind, or of all."""
        forward, backward = (
            sum(one.shown for one in way if kind in (None, one.kind)) for way in (self.forward, self.backward)
        )
        return forward, backward


class Operators:
    """Times the blocks of ``shape`` at ``place``."""

    def __init__(self, shape: ModelShape, place: Place, load: Load) -> None:
        self.shape, self.place, self.load = shape, place, load
        self._gpu = place.cluster.accelerator
        self._parallel, self._spans = place.mapping.parallel, place.spans
        self._size = load.size
        p = self._parallel
        self.group_tokens = place.mapping.micro_batch * load.seq_len / p.cp
        """Of a micro-batch on a tensor-parallel group."""
        self.tokens = self.group_tokens / p.tp
        """Of a micro-batch on a rank, between blocks."""
        self.row_bytes = shape.hidden * self._size
        """Of a token between blocks."""

    @property
    def _busiest(self) -> float:
        """Rows of the busiest rank over the mean. Where ranks share cores, the others' time is its own while they wait
        for it: it sets the pace only if it has more than it could do with all of a core."""
        busiest = self.load.busiest(self._parallel.ep)
        return max(min(1.0, busiest), busiest / self._gpu.shared)

    def layer(self, kind: LayerKind) -> Pass:
        """One layer of a kind."""
        found = [self._block(block.name) for block, times in self.shape.layer_blocks(kind) for _ in range(times)]
        return _joined(found)

    def _block(self, name: str) -> Pass:
        """Blocks are the same for many mappings: of the experts' degrees, for one, attention knows nothing."""
        mapping, p = self.place.mapping, self._parallel
        settings: tuple[object, ...] = (p.tp, p.cp, mapping.micro_batch, mapping.overlap)
        settings += (p.ep, p.etp, mapping.dispatcher) if name == "moe" else ()
        return _block(_Block(name, self.shape, self.place.cluster, self.load, settings, self))

    def attention(self) -> Pass:
        shape, p, size = self.shape, self._parallel, self._size
        block, tokens = shape.attention_block, self.group_tokens
        width = shape.qkv_width
        values = shape.heads * shape.value_dim
        # What transfers can be fused with: all of qkv's matrices that read the input, as one.
        first = self._one(tokens, width / p.tp, shape.hidden)
        last = self._one(tokens, shape.hidden, values / p.tp)
        found = [self._norm(), self._gather("attention gather", "tp", product=first)]
        found += [self._product("qkv", weight, tokens, _cut(weight, p.tp)) for weight in block.products("qkv")]
        found.append(self._memory("rope", 2 * tokens * width / p.tp * size))
        found.append(self._swap("attention swap in", tokens * width / p.tp * size, first))
        found.append(self._scores(tokens))
        found.append(self._swap("attention swap out", tokens * values / p.tp * size, last))
        found += [self._product("out", weight, tokens, (weight.k / p.tp, weight.n)) for weight in block.products("out")]
        found += [self._scatter("attention scatter", "tp", product=last), self._residual()]
        return _joined(found)

    def dense(self) -> Pass:
        return _joined([self._norm(), *self._cut_block("dense", self.shape.dense_block), self._residual()])

    def experts(self) -> Pass:
        """Router, dispatch, experts, combine; and the shared expert, which is cut by tp as a dense block is."""
        shape, p = self.shape, self._parallel
        block = shape.moe_block
        # Ranks that all have a part of every expert have the same to do, whatever the routing.
        even, kept = self.tokens * shape.chosen, min(1.0, self.load.capacity or 1.0)
        way, over = self.place.mapping.dispatcher, self.place.mapping.overlap == "all"
        span = dispatch_span(way, self.place.cluster, p)
        # A token that has come by all_gather is there for all parts of its experts.
        apart = p.etp > 1 and way != "all_gather"
        moved = Rows(self.tokens, even, kept, self._busiest, shape.hidden, self._size).for_parts(1 if apart else p.etp)
        moves = dispatching(way, shape, self.place.cluster, span, moved, overlapped=over)
        rows = even * self._busiest * p.etp
        local = shape.experts / p.ep
        found = [self._norm()]
        found += [
            self._product("router", weight, self.tokens, (weight.k, weight.n)) for weight in block.products("router")
        ]
        scores = shape.experts + shape.zero_experts
        found.append(self._memory("routing", 6 * self.tokens * scores * SCORE_BYTES))
        found.append(self._memory("permute", moves.leave, moves.home))
        up, down = block.products("experts")
        each = (rows / local, int(max(local, 1)))
        first = self._one(each[0], up.n / p.etp, up.k, each[1])
        last = self._one(each[0], down.n, down.k / p.etp, each[1])
        # Only the transfer next to the experts' products is fused with them.
        found.append(self._expert_transfer("dispatch", span, moves.out, moves.back, None if apart else first))
        if apart:
            found.append(self._gather("expert gather", "etp", rows, product=first))
        sort = 2 * rows * self.row_bytes if local > 1 and p.ep * p.etp > 1 else 0.0
        arrive, depart = (
            more + (sort if by_expert or apart else 0.0)
            for more, by_expert in ((moves.arrive, moves.sorted_out), (moves.depart, moves.sorted_back))
        )
        found.append(self._memory("sort", arrive, depart))
        found.append(self._product("experts", up, each[0], (up.k, up.n / p.etp), each[1]))
        found.append(self._activation("experts", rows, up.n / p.etp, down.k / p.etp))
        found.append(self._product("experts", down, each[0], (down.k / p.etp, down.n), each[1]))
        found.append(self._memory("sort", depart, arrive))
        if apart:
            found.append(self._scatter("expert scatter", "etp", rows, product=last))
        found.append(self._expert_transfer("combine", span, moves.back, moves.out, None if apart else last))
        found.append(self._memory("unpermute", moves.home, moves.leave))
        if block.products("shared"):
            found += self._cut_block("shared", block)
        return _joined([*found, self._residual()])

    def head(self) -> Pass:
        """Final norm, output projection and loss."""
        p, tokens = self._parallel, self.group_tokens
        found = [self._norm()]
        for weight in self.shape.head_block.products("head"):
            product = self._one(tokens, weight.n / p.tp, weight.k)
            found.append(self._gather("head gather", "tp", product=product))
            found.append(self._product("head", weight, tokens, (weight.k, weight.n / p.tp)))
            logits = tokens * weight.n / p.tp
            found.append(self._memory("loss", logits * (self._size + 2 * SCORE_BYTES)))
        return _joined(found)

    def embedding(self) -> Pass:
        return self._memory("embedding", 2 * self.tokens * self.row_bytes)

    # --- kinds of operators ---

    def _product(self, name: str, weight: Weight, rows: float, shape: tuple[float, float], groups: int = 1) -> Pass:
        k, n = shape
        gpu, dtype, flops = self._gpu, self.load.dtype, 2 * rows * groups * k * n
        if dtype == "fp8" and name in IN_BF16:
            dtype = "bf16"
        # Without slots to fill, experts have unequal numbers of rows.
        uneven = name == "experts" and self.load.capacity is None
        reached = gpu.sustained * (gpu.grouped if uneven else 1.0)
        forward = gpu.gemm_seconds(rows, n, k, dtype, groups, uneven=uneven) / reached
        later = gpu.gemm_seconds(k, n, rows, dtype, groups) / reached
        later += gpu.memory_seconds(gpu.accumulate * groups * k * n * self._size)
        backward = gpu.gemm_seconds(rows, k, n, dtype, groups, uneven=uneven) / reached + later
        full = f"{name} {weight.name}" if weight.name != name else name
        moved = groups * (rows * k + k * n + rows * n) * self._size
        one = Pass(
            (Operation(full, "product", forward, flops, moved),),
            (Operation(full, "product", backward, 2 * flops, 2 * moved, later=later),),
        )
        if dtype != "fp8":
            return one
        cast = self._memory("cast", CAST_BYTES * groups * rows * k, CAST_BYTES * groups * rows * n)
        return Pass((*cast.forward, *one.forward), (*cast.backward, *one.backward))

    def _one(self, rows: float, n: float, k: float, groups: int = 1) -> Product:
        return Product(rows, n, k, self.load.dtype, groups)

    def _cut_block(self, name: str, block: Block) -> list[Pass]:
        """A feed-forward block that is cut by tp."""
        tp, tokens = self._parallel.tp, self.group_tokens
        weights = block.products(name)
        up = next(weight for weight in weights if weight.name == "up")
        down = next(weight for weight in weights if weight.name == "down")
        found = [self._gather(f"{name} gather", "tp", product=self._one(tokens, up.n / tp, up.k))]
        found += self._feed_forward(name, weights, tokens)
        return [*found, self._scatter(f"{name} scatter", "tp", product=self._one(tokens, down.n, down.k / tp))]

    def _feed_forward(self, name: str, weights: tuple[Weight, ...], tokens: float) -> list[Pass]:
        tp = self._parallel.tp
        found = []
        up = next(weight for weight in weights if weight.name == "up")
        down = next(weight for weight in weights if weight.name == "down")
        found.append(self._product(name, up, tokens, (up.k, up.n / tp)))
        found.append(self._activation(name, tokens, up.n / tp, down.k / tp))
        found.append(self._product(name, down, tokens, (down.k / tp, down.n)))
        gates = [weight for weight in weights if weight not in (up, down)]
        return found + [self._product(name, weight, self.tokens, (weight.k, weight.n)) for weight in gates]

    def _activation(self, name: str, rows: float, inner: float, outer: float) -> Pass:
        forward = rows * (inner + outer) * self._size
        return self._memory(f"{name} act", forward, rows * (2 * inner + outer) * self._size)

    def _scores(self, tokens: float) -> Pass:
        shape, p, gpu = self.shape, self._parallel, self._gpu
        flops = shape.attention_block.per_context * shape.context(self.load.seq_len) * tokens / p.tp
        again = 2.5 * flops  # five products of the same size, one of which is forward's done again
        dtype = "bf16" if self.load.dtype == "fp8" else self.load.dtype
        return Pass(
            (Operation("scores", "product", gpu.attention_seconds(flops, dtype) / gpu.sustained, flops),),
            (
                Operation(
                    "scores", "product", gpu.attention_seconds(again, dtype, backward=True) / gpu.sustained, 2 * flops
                ),
            ),
        )

    def _memory(self, name: str, num_bytes: float, backward: float | None = None) -> Pass:
        again = num_bytes if backward is None else backward
        one, other = (
            (Operation(name, "memory", self._gpu.launch_s + self._gpu.memory_seconds(each), bytes=each),)
            if each
            else ()
            for each in (num_bytes, again)
        )
        return Pass(one, other)

    def _norm(self) -> Pass:
        return self._memory("norm", 2 * self.tokens * self.row_bytes, 4 * self.tokens * self.row_bytes)

    def _residual(self) -> Pass:
        return self._memory("residual", 3 * self.tokens * self.row_bytes, 3 * self.tokens * self.row_bytes)

    def _gather(self, name: str, axis: str, rows: float | None = None, *, product: Product) -> Pass:
        """All-gather of a rank's rows over ``axis``; with tp once more in backward. rows: that it has afterwards."""
        span = self._spans[axis]
        if span.ranks == 1:
            return Pass((), ())
        full = (self.group_tokens if rows is None else rows) * self.row_bytes
        inside = self._inside(span, product, "gather", full)
        gathered = _transfer(name, self.place.cluster.all_gather(full, span), inside)
        scattered = _transfer(name, self.place.cluster.reduce_scatter(full, span), inside)
        again = (replace(gathered, name=f"{name} again"),) if axis == "tp" else ()
        return Pass((gathered,), (*again, scattered))

    def _scatter(self, name: str, axis: str, rows: float | None = None, *, product: Product) -> Pass:
        """Reduce-scatter over ``axis``; its backward is an all-gather."""
        span = self._spans[axis]
        if span.ranks == 1:
            return Pass((), ())
        full = (self.group_tokens if rows is None else rows) * self.row_bytes
        inside = self._inside(span, product, "scatter", full)
        scattered = _transfer(name, self.place.cluster.reduce_scatter(full, span), inside)
        return Pass((scattered,), (_transfer(name, self.place.cluster.all_gather(full, span), inside),))

    def _swap(self, name: str, num_bytes: float, product: Product) -> Pass:
        return self._all_to_all(name, self._spans["cp"], num_bytes, product)

    def _all_to_all(self, name: str, span: Span, num_bytes: float, product: Product | None) -> Pass:
        if span.ranks == 1:
            return Pass((), ())
        inside = 0.0 if product is None else self._inside(span, product, "exchange", num_bytes)
        one = _transfer(name, self.place.cluster.all_to_all(num_bytes, span), inside)
        return Pass((one,), (one,))

    def _expert_transfer(self, name: str, span: Span, there: Transfer, back: Transfer, product: Product | None) -> Pass:
        """Forward one way, backward the other. product: that it can be fused with."""
        if span.ranks == 1:
            return Pass((), ())

        def one(each: Transfer) -> tuple[Operation, ...]:
            inside = self._inside(span, product, each.way, each.num_bytes) if product and each.way else 0.0
            return (_transfer(name, each.moved, inside),)

        return Pass(one(there), one(back))

    def _inside(self, span: Span, product: Product, way: fused.Way, num_bytes: float) -> float:
        """With overlap "all", the share of a transfer that goes on inside a product; backward has the same products,
        the other way round."""
        if self.place.mapping.overlap != "all":
            return 0.0
        transport = fused.COPIES if way == "gather" else fused.STORES
        return fused.fused(self.place.cluster, span, product, way, num_bytes, transport).hidden


@dataclass(frozen=True)
class _Block:
    """A block, and what its operators depend on; ``of`` are some that they are the same for."""

    name: str
    shape: ModelShape
    cluster: Cluster
    load: Load
    settings: tuple[object, ...]
    of: Operators = field(compare=False)


@lru_cache(maxsize=4096)
def _block(one: _Block) -> Pass:
    passes = {"attention": one.of.attention, "dense": one.of.dense, "moe": one.of.experts}
    return passes[one.name]()


def _transfer(name: str, moved: Moved, inside: float) -> Operation:
    sent = moved.inside + moved.between + moved.across
    return Operation(name, "transfer", moved.seconds, bytes=sent, moved=moved, inside=inside)


def _cut(weight: Weight, tp: int) -> tuple[float, float]:
    """[k, n] of a rank's part: columns are cut, but for the latent projections, which every rank has whole."""
    return (weight.k, weight.n) if weight.name.endswith("_down") else (weight.k, weight.n / tp)


def _joined(passes: Iterable[Pass]) -> Pass:
    """One after the other; backward the other way round."""
    every = list(passes)
    return Pass(
        tuple(one for part in every for one in part.forward),
        tuple(one for part in reversed(every) for one in part.backward),
    )
