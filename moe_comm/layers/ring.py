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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.layers.autocast import without_autocast
from moe_comm.layers.collectives import channel_of, group_rank, group_size
from moe_comm.layers.pieces import Chunk, Gradients, Piece, State, plan
from moe_comm.layers.sequence import Documents, chunks_of


@dataclass(frozen=True)
class RingSpec:
    """Everything about one attention but its tensors. A group of None is a ring of one: attention of pieces."""

    group: ProcessGroup | None
    scale: float
    window: int | None = None
    documents: Documents | None = None

    def pieces(self, q_BhSd: Tensor, owner: int) -> list[Piece]:
        """What this rank's queries have to do with the keys of rank ``owner``."""
        cp, rank = group_size(self.group), group_rank(self.group)
        batch, length = q_BhSd.shape[0], q_BhSd.shape[2] * cp

        def make() -> list[Piece]:
            chunks = [[Chunk(*chunk) for chunk in chunks_of(length, cp, who, "ring")] for who in (rank, owner)]
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
        key = (batch, length, cp, rank, owner, self.window, q_BhSd.device)
        if key not in self.documents.plans:
            self.documents.plans[key] = make()
        found: list[Piece] = self.documents.plans[key]
        return found


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
        state = State.empty(q, v.shape[-1])
        with without_autocast(q):
            for owner, k_here, v_here in _passing(k, v, spec):
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
        wide = lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        returning: Callable[[], Tensor] | None = None
        for owner, k_here, v_here in _passing(k, v, spec):
            sums = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)
            gradients = Gradients(dq, *_views(sums, k, v))
            gradients.add(grad, (out, lse), (q, k_here, v_here), spec.pieces(q, owner), spec.scale)
            if returning is not None:
                sums += returning()
            # On to the rank that has these keys next; after the last step that is their owner.
            returning = _send(sums, spec, "the gradients of keys and values")
        assert returning is not None
        dk, dv = _views(returning(), k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _passing(k: Tensor, v: Tensor, spec: RingSpec) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(owner, k, v) as they come by: first one's own, then those of the rank before, and so on round the ring."""
    cp, rank = group_size(spec.group), group_rank(spec.group)
    if cp == 1:
        yield 0, k, v
        return
    packed = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(cp):
        arriving = _send(packed, spec, "keys and values") if step + 1 < cp else None
        yield (rank - step) % cp, *_views(packed, k, v)
        if arriving is not None:
            packed = arriving()


def _send(packed: Tensor, spec: RingSpec, what: str) -> Callable[[], Tensor]:
    if spec.group is None:
        return lambda: packed
    return channel_of(spec.group).rotate(packed, f"ring attention, {what} {tuple(packed.shape)}")


def _views(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``packed`` as tensors like k and v."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)
