"""Causal attention over a sequence that is spread over a ring of ranks (ring attention, arXiv 2310.01889).

    forward, cp 3, what rank 1 does         step 0            step 1            step 2
        keys and values at hand             its own           rank 0's          rank 2's
        meanwhile                           own ─▶ rank 2     rank 0's ─▶ 2     -
                                            0's ◀─ rank 0     2's ◀─ rank 0

    backward: keys and values go round once more; the sum of their gradients follows one step behind, each rank adds
    its part, and after cp steps it is back at its owner.

Ranks hold chunks in zig-zag order (``sequence``), so every rank has the same work in every step: in step 0 its own
causal part, afterwards half of the rectangle. Transfers run while the step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.kernels.autocast import without_autocast
from moe_comm.layers.attention.attention_blocks import Chunk, Gradients, Piece, State, plan
from moe_comm.layers.attention.sequence import Documents, chunks_of
from moe_comm.layers.parallel.collectives import channel_of, group_rank, group_size

LINE_BYTES = 64


@dataclass(frozen=True)
class RingSpec:
    """Everything about one attention but its tensors. A group of None is a ring of one: attention of pieces."""

    group: ProcessGroup | None
    scale: float
    window: int | None = None
    documents: Documents | None = None

    def pieces(self, q_BhSd: Tensor, owner: int, asker: int | None = None) -> list[Piece]:
        """What the queries of rank ``asker`` (None: this one) have to do with the keys of rank ``owner``.

        Pieces for this rank's own keys are the first that the queries meet here.
        """
        cp, rank = group_size(self.group), group_rank(self.group)
        asker = rank if asker is None else asker
        batch, length = q_BhSd.shape[0], q_BhSd.shape[2] * cp

        def make() -> list[Piece]:
            chunks = [[Chunk(*chunk) for chunk in chunks_of(length, cp, who, "ring")] for who in (asker, owner)]
            return plan(
                *chunks,
                batch=batch,
                window=self.window,
                documents=self.documents,
                device=q_BhSd.device,
                first=owner == rank,
            )

        if self.documents is None:
            return make()
        key = (batch, length, cp, asker, owner, owner == rank, self.window, q_BhSd.device)
        if key not in self.documents.plans:
            self.documents.plans[key] = make()
        found: list[Piece] = self.documents.plans[key]
        return found

    def begin(self, what: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ``RankMismatch`` on every rank unless all begin the same, where that is compared."""
        if self.group is not None and group_size(self.group) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            description = f"{what} of {shapes} {str(q.dtype).removeprefix('torch.')}, window {self.window}"
            channel_of(self.group).agree(description, q)


def ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: RingSpec) -> Tensor:
    """[B, h, S / cp, dv] attention of this rank's queries to the whole sequence. Collective over ``spec.group``.

    Args:
        q_BhSd: [B, h, S / cp, d]. k_BkSd, v_BkSd: [B, k, S / cp, d] and [.., dv], h a multiple of k.

    Raises:
        InputError: the sequence cannot be cut into 2 * cp chunks.
        PeerDied, PeerTimeout: a rank of the ring is gone, or does not come.
    """
    return _Ring.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: RingSpec) -> Tensor:
        spec.begin("ring attention", q, k, v)
        state = State.empty(q, v.shape[-1])
        with without_autocast(q):
            for owner, (k_here, v_here) in passing([k, v], spec, "ring attention, keys and values"):
                state.add(q, k_here, v_here, spec.pieces(q, owner), spec.scale)
        out = state.out.to(q.dtype)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec: RingSpec = ctx.spec
        spec.begin("ring attention backward", q, k, v)
        wide = lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)

        def add(keys: tuple[Tensor, Tensor], pieces: Sequence[Piece]) -> Tensor:
            sums = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)
            Gradients(dq, *_views(sums, k, v)).add(grad, (out, lse), (q, *keys), pieces, spec.scale)
            return sums

        own, later = halves(spec.pieces(q, group_rank(spec.group)), spec)
        returning: Callable[[], Tensor] | None = None
        for step, (owner, (k_here, v_here)) in enumerate(
            passing([k, v], spec, "ring attention backward, keys and values")
        ):
            sums = add((k_here, v_here), spec.pieces(q, owner) if step else own)
            if returning is not None:
                sums += returning()
            # On to the rank that has these keys next; after the last step that is their owner.
            returning = _send(sums, spec, "ring attention backward, the gradients of keys and values")
        assert returning is not None
        rest = add((k, v), later) if later else None
        sums = returning()
        dk, dv = _views(sums if rest is None else sums + rest, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def passing(mine: Sequence[Tensor], spec: RingSpec, what: str) -> Iterator[tuple[int, list[Tensor]]]:
    """(owner, tensors) as they come by: first one's own, then those of the rank before, and so on round the ring.

    What is at hand goes on to the next rank before it is yielded, and travels while the caller works with it.
    """
    cp, rank = group_size(spec.group), group_rank(spec.group)
    if cp == 1:
        yield 0, list(mine)
        return
    packed = pack(mine)
    for step in range(cp):
        arriving = _send(packed, spec, what) if step + 1 < cp else None
        yield (rank - step) % cp, unpack(packed, mine)
        if arriving is not None:
            packed = arriving()


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Bytes that hold ``tensors`` one after the other, each from a cache line on: kernels read them there."""
    places = _places(tensors)
    packed = torch.empty(places[-1].stop, dtype=torch.uint8, device=tensors[0].device)
    for place, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        place.copy_(tensor)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """``packed`` as tensors like those of ``like``."""
    return [packed[at].view(t.dtype).view(t.shape) for at, t in zip(_places(like), like, strict=True)]


def _places(tensors: Sequence[Tensor]) -> list[slice]:
    found, end = [], 0
    for tensor in tensors:
        start = -(-end // LINE_BYTES) * LINE_BYTES
        end = start + tensor.numel() * tensor.element_size()
        found.append(slice(start, end))
    return found


def halves(pieces: list[Piece], spec: RingSpec) -> tuple[list[Piece], list[Piece]]:
    """Own pieces that hide the first transfer, and those kept to hide the last; all of them at once in a ring of one.

    Those kept are no longer the first that their queries meet.
    """
    if group_size(spec.group) == 1:
        return pieces, []
    cut = len(pieces) // 2
    return pieces[:cut], [replace(piece, first=False) for piece in pieces[cut:]]


def _send(packed: Tensor, spec: RingSpec, what: str) -> Callable[[], Tensor]:
    if spec.group is None:
        return lambda: packed
    return channel_of(spec.group).rotate(packed, f"{what}, {packed.nbytes} bytes")


def _views(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``packed`` as tensors like k and v."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
