"""Ring attention: causal attention of a sequence that is split over a ring of ranks (arXiv 2310.01889).

    forward, cp 3, rank 1                   step 0            step 1            step 2
        local keys and values of            rank 1            rank 0            rank 2
        sends, in flight                    1's ─▶ rank 2     0's ─▶ rank 2     -
        receives, in flight                 0's ◀─ rank 0     2's ◀─ rank 0

    backward: keys and values circulate once more. The sum of their gradients follows one step behind, each rank adds
    its contribution, and after cp steps the sum arrives at the owner of the keys.

Ranks hold chunks in zig-zag order (``sequence``), so all ranks have the same work in each step: their own causal part
in step 0, and half of the rectangle afterwards. Transfers overlap with the computation of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import AbortOnError
from moe_comm.kernels.autograd import once_differentiable, without_autocast
from moe_comm.layers.attention.attention_blocks import (
    AttentionGradients,
    AttentionState,
    ScoreBlock,
    SequenceChunk,
    plan_blocks,
)
from moe_comm.layers.attention.sequence import Documents, chunks_of
from moe_comm.layers.parallel.collectives import abort_on_error, channel_of, group_rank, group_size

Gradients = tuple[Tensor | None, ...]
LINE_BYTES = 64


@dataclass(frozen=True)
class RingSpec:
    """Parameters of one attention call. With group None this is a ring of one rank: attention in blocks."""

    group: ProcessGroup | None
    scale: float
    window: int | None = None
    documents: Documents | None = None

    def blocks(self, q_BhSd: Tensor, key_rank: int, query_rank: int | None = None) -> list[ScoreBlock]:
        """Return the score blocks of the queries of ``query_rank`` (None: this rank) and the keys of ``key_rank``.

        Blocks with this rank's own keys are marked ``first``: no earlier block has their queries.
        """
        cp, rank = group_size(self.group), group_rank(self.group)
        query_rank = rank if query_rank is None else query_rank
        batch, length = q_BhSd.shape[0], q_BhSd.shape[2] * cp

        def plan() -> list[ScoreBlock]:
            chunks = [
                [SequenceChunk(*chunk) for chunk in chunks_of(length, cp, holder, "ring")]
                for holder in (query_rank, key_rank)
            ]
            return plan_blocks(
                *chunks,
                batch=batch,
                window=self.window,
                documents=self.documents,
                device=q_BhSd.device,
                first=key_rank == rank,
            )

        if self.documents is None:
            return plan()
        key = (batch, length, cp, query_rank, key_rank, key_rank == rank, self.window, q_BhSd.device)
        if key not in self.documents.plans:
            self.documents.plans[key] = plan()
        blocks: list[ScoreBlock] = self.documents.plans[key]
        return blocks

    def begin(self, operation: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ``RankMismatch`` on every rank if the ranks call with different arguments and checks are enabled.

        Then raise ``InputError`` if the sequence cannot be split.
        """
        if self.group is not None and group_size(self.group) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            description = f"{operation} of {shapes} {str(q.dtype).removeprefix('torch.')}, window {self.window}"
            channel_of(self.group).compare_before_transfer(description, q)
            chunks_of(q.shape[2] * group_size(self.group), group_size(self.group), group_rank(self.group), "ring")

    def in_flight(self) -> AbortOnError:
        """Return a context manager that reports an exception to the other ranks, which may be in a transfer."""
        return abort_on_error("attention", self.group, in_flight=True)


def ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: RingSpec) -> Tensor:
    """Return [B, h, S / cp, dv], the attention of this rank's queries to the full sequence. Collective.

    q_BhSd is [B, h, S / cp, d], k_BkSd [B, k, S / cp, d] and v_BkSd [B, k, S / cp, dv]; h is a multiple of k. Errors
    are those of ``context_attention``.
    """
    spec.begin("ring attention", q_BhSd, k_BkSd, v_BkSd)
    with spec.in_flight():
        return _Ring.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


def in_flight_backward(backward: Callable[[Any, Tensor], Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """Return ``backward``, in the ``in_flight`` block of the ``spec`` of its context."""

    def run(ctx: Any, grad: Tensor) -> Gradients:
        with ctx.spec.in_flight():
            return backward(ctx, grad)

    return run


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: RingSpec) -> Tensor:
        state = AttentionState.empty(q, v.shape[-1])
        with without_autocast(q):
            for key_rank, (k_step, v_step) in ring_steps([k, v], spec, "ring attention, keys and values"):
                state.add(q, k_step, v_step, spec.blocks(q, key_rank), spec.scale)
        out = state.out.to(q.dtype)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    @once_differentiable
    @in_flight_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec: RingSpec = ctx.spec
        spec.begin("ring attention backward", q, k, v)
        wide = lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)

        def gradients_for(keys: tuple[Tensor, Tensor], blocks: Sequence[ScoreBlock]) -> Tensor:
            sums = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)
            AttentionGradients(dq, *_views(sums, k, v)).add(grad, (out, lse), (q, *keys), blocks, spec.scale)
            return sums

        first, second = split_own_blocks(spec.blocks(q, group_rank(spec.group)), spec)
        receive_sums: Callable[[], Tensor] | None = None
        for step, (key_rank, (k_step, v_step)) in enumerate(
            ring_steps([k, v], spec, "ring attention backward, keys and values")
        ):
            sums = gradients_for((k_step, v_step), spec.blocks(q, key_rank) if step else first)
            if receive_sums is not None:
                sums += receive_sums()
            # Send to the rank that receives these keys next; after the last step, to their owner.
            receive_sums = _send(sums, spec, "ring attention backward, the gradients of keys and values")
        assert receive_sums is not None
        second_sums = gradients_for((k, v), second) if second else None
        sums = receive_sums()
        dk, dv = _views(sums if second_sums is None else sums + second_sums, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def ring_steps(local_tensors: Sequence[Tensor], spec: RingSpec, operation: str) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, tensors) for each step: this rank's tensors, then those of the previous ranks in the ring.

    The tensors of a step are sent to the next rank before they are yielded, so the transfer overlaps with the caller's
    work.
    """
    cp, rank = group_size(spec.group), group_rank(spec.group)
    if cp == 1:
        yield 0, list(local_tensors)
        return
    packed = pack(local_tensors)
    for step in range(cp):
        receive = _send(packed, spec, operation) if step + 1 < cp else None
        yield (rank - step) % cp, unpack(packed, local_tensors)
        if receive is not None:
            packed = receive()


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy ``tensors`` into one byte tensor, each aligned to a cache line, so that kernels can read them in place."""
    packed = torch.empty(_byte_ranges(tensors)[-1].stop, dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        view.copy_(tensor)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View ``packed`` as tensors with the shapes and dtypes of ``like``."""
    return [packed[span].view(t.dtype).view(t.shape) for span, t in zip(_byte_ranges(like), like, strict=True)]


def _byte_ranges(tensors: Sequence[Tensor]) -> list[slice]:
    ranges, end = [], 0
    for tensor in tensors:
        start = -(-end // LINE_BYTES) * LINE_BYTES
        end = start + tensor.numel() * tensor.element_size()
        ranges.append(slice(start, end))
    return ranges


def split_own_blocks(blocks: list[ScoreBlock], spec: RingSpec) -> tuple[list[ScoreBlock], list[ScoreBlock]]:
    """Split a rank's own blocks into two parts, which overlap with the first and the last transfer."""
    if group_size(spec.group) == 1:
        return blocks, []
    cut = len(blocks) // 2
    return blocks[:cut], [replace(block, first=False) for block in blocks[cut:]]


def _send(packed: Tensor, spec: RingSpec, operation: str) -> Callable[[], Tensor]:
    if spec.group is None:
        return lambda: packed
    return channel_of(spec.group).rotate(packed, f"{operation}, {packed.nbytes} bytes")


def _views(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """View ``packed`` as tensors with the shapes of k and v."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
