"""Ring attention in which queries circulate and keys stay, which uses both directions of each link (TokenRing, arXiv
2412.20501).

    forward, cp 3, rank 1               step 0            step 1                step 2             afterwards
        local queries of                rank 1, 1st half  rank 0                rank 2             rank 1, 2nd half
        sends to the next rank          1's ─▶ rank 2     0's ─▶ rank 2         -                  -
        sends to the owner              -                 -                     output for rank 0  output for rank 2

Each rank returns the output for its keys, and the log-sum-exp of the scores, to the owner of the queries. The owner
merges them in the order of the steps, so the bits do not depend on timing. In backward, queries circulate with the
output gradient and the merged output. Gradients of keys and values stay, and those of queries are returned.

Elements per token and step on the busier direction of a link, for h heads, k key and value heads and equal widths d:
forward h d instead of 2 k d for the ring, backward 3 h d instead of 2 k d + 4 k d (gradients are sent in fp32; 16-bit
activations). TokenRing is thus faster if k is close to h and links are full-duplex.

The layout of the sequence, windows and documents are those of ``ring``: the same score blocks, on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.autograd import once_differentiable, without_autocast
from moe_comm.layers.attention.attention_blocks import AttentionGradients, AttentionState
from moe_comm.layers.attention.ring import RingSpec, in_flight_backward, pack, ring_steps, split_own_blocks, unpack
from moe_comm.layers.parallel.collectives import channel_of, group_rank


def token_ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: RingSpec) -> Tensor:
    """Return the result of ``ring_attention``. Collective.

    The results differ in rounding: outputs for one rank's keys are sent in the dtype of the queries. Calls of the ranks
    are always compared over shared memory, and a difference raises ``RankMismatch``.
    """
    spec.begin("token ring attention", q_BhSd, k_BkSd, v_BkSd)
    with spec.in_flight():
        return _TokenRing.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


class _TokenRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: RingSpec) -> Tensor:
        rank = group_rank(spec.group)
        first, second = split_own_blocks(spec.blocks(q, rank), spec)
        state = AttentionState.no_keys(q, v.shape[-1])
        results = _ResultReturn(
            spec, "token ring attention, outputs", lambda received: state.merge(received[1], received[0])
        )
        with without_autocast(q):
            for query_rank, (q_step,) in ring_steps([q], spec, "token ring attention, queries"):
                if query_rank == rank:
                    state.add(q, k, v, first, spec.scale)
                    continue
                part = AttentionState.no_keys(q, v.shape[-1])
                part.add(q_step, k, v, spec.blocks(q, rank, query_rank), spec.scale)
                results.send([part.lse, part.out.to(q.dtype)])
            state.add(q, k, v, second, spec.scale)
            results.wait()
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
        spec.begin("token ring attention backward", q, k, v)
        rank = group_rank(spec.group)
        first, second = split_own_blocks(spec.blocks(q, rank), spec)
        dq, dk, dv = (torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v))
        results = _ResultReturn(
            spec, "token ring attention backward, gradients of queries", lambda received: dq.add_(received[0])
        )
        local_tensors = [lse, q, grad.to(q.dtype), out]
        for query_rank, (lse_step, q_step, grad_step, out_step) in ring_steps(
            local_tensors, spec, "token ring attention backward, queries"
        ):
            if query_rank == rank:
                AttentionGradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), first, spec.scale)
                continue
            part = torch.zeros_like(dq)
            blocks = spec.blocks(q, rank, query_rank)
            AttentionGradients(part, dk, dv).add(grad_step, (out_step, lse_step), (q_step, k, v), blocks, spec.scale)
            results.send([part])
        AttentionGradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), second, spec.scale)
        results.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _ResultReturn:
    """Returns results to the owners of the queries, one per step; passes received results to ``consume`` in order."""

    def __init__(self, spec: RingSpec, operation: str, consume: Callable[[list[Tensor]], object]) -> None:
        self._spec, self._operation, self._consume = spec, operation, consume
        self._step = 0
        self._pending: Callable[[], list[Tensor]] | None = None

    def send(self, tensors: list[Tensor]) -> None:
        """Start to send this step's results to the owner of the queries."""
        self.wait()
        assert self._spec.group is not None
        self._step += 1
        packed = pack(tensors)
        description = f"{self._operation}, {packed.nbytes} bytes"
        receive = channel_of(self._spec.group).rotate(packed, description, -self._step)
        self._pending = lambda: unpack(receive(), tensors)

    def wait(self) -> None:
        """Wait for the pending results for this rank's queries, and consume them."""
        if self._pending is not None:
            self._consume(self._pending())
            self._pending = None
