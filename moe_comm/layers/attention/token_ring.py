"""Ring attention in which queries travel and keys stay, so that both ways of every link carry something (TokenRing,
arXiv 2412.20501).

    forward, cp 3, what rank 1 does     step 0            step 1                step 2             then
        queries at hand                 half of its own   rank 0's              rank 2's           the rest of its own
        meanwhile, to the next rank     own ─▶ rank 2     rank 0's ─▶ rank 2    -                  -
        meanwhile, to their owner       -                 -                     output for rank 0  output for rank 2

What goes back is the output of the keys at hand and the log of the sum of its exponentials; the owner merges them in
the order of the steps, whenever they arrive, so timing does not change a bit. Backward: queries travel with the
gradient and the merged output, gradients of keys and values stay where they are, and those of the queries go back.

Against the ring, in elements per token and step on the busier way of a link, with h heads, k key and value heads and
all widths d: forward h d and not 2 k d, backward 3 h d and not 2 k d + 4 k d (gradients travel in fp32; 16-bit
activations). So it is for as many key and value heads as query heads, and for links that work both ways at once.

The layout is the ring's (``sequence``), and so are windows and documents: the same pieces of the scores are computed,
by other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.kernels.autocast import without_autocast
from moe_comm.layers.attention.attention_blocks import Gradients, State
from moe_comm.layers.attention.ring import RingSpec, halves, pack, passing, unpack
from moe_comm.layers.parallel.collectives import channel_of, group_rank


def token_ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: RingSpec) -> Tensor:
    """[B, h, S / cp, dv] attention of this rank's queries to the whole sequence. Collective over ``spec.group``.

    The same as ``ring_attention`` but for rounding: outputs of one rank's keys travel in the dtype of the queries.

    Args:
        q_BhSd: [B, h, S / cp, d]. k_BkSd, v_BkSd: [B, k, S / cp, d] and [.., dv], h a multiple of k.

    Raises:
        InputError: the sequence cannot be cut into 2 * cp chunks.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank of the ring is gone, or does not come.
    """
    return _TokenRing.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


class _TokenRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: RingSpec) -> Tensor:
        spec.begin("token ring attention", q, k, v)
        rank = group_rank(spec.group)
        own, later = halves(spec.pieces(q, rank), spec)
        state = State.nothing(q, v.shape[-1])
        home = _Returns(spec, "token ring attention, outputs", lambda found: state.merge(found[1], found[0]))
        with without_autocast(q):
            for asker, (q_here,) in passing([q], spec, "token ring attention, queries"):
                if asker == rank:
                    state.add(q, k, v, own, spec.scale)
                    continue
                part = State.nothing(q, v.shape[-1])
                part.add(q_here, k, v, spec.pieces(q, rank, asker), spec.scale)
                home.send([part.lse, part.out.to(q.dtype)])
            state.add(q, k, v, later, spec.scale)
            home.take()
        out = state.out.to(q.dtype)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec: RingSpec = ctx.spec
        spec.begin("token ring attention backward", q, k, v)
        rank = group_rank(spec.group)
        own, later = halves(spec.pieces(q, rank), spec)
        dq, dk, dv = (torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v))
        home = _Returns(spec, "token ring attention backward, gradients of queries", lambda found: dq.add_(found[0]))
        mine = [lse, q, grad.to(q.dtype), out]
        for asker, (lse_here, q_here, grad_here, out_here) in passing(
            mine, spec, "token ring attention backward, queries"
        ):
            if asker == rank:
                Gradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), own, spec.scale)
                continue
            part = torch.zeros_like(dq)
            pieces = spec.pieces(q, rank, asker)
            Gradients(part, dk, dv).add(grad_here, (out_here, lse_here), (q_here, k, v), pieces, spec.scale)
            home.send([part])
        Gradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), later, spec.scale)
        home.take()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _Returns:
    """Results on their way to the ranks that asked, one a step, and others' results for this rank.

    Args:
        use: called with the tensors that arrive, in the order of steps: the last step's while this one's travel.
    """

    def __init__(self, spec: RingSpec, what: str, use: Callable[[list[Tensor]], object]) -> None:
        self._spec, self._what, self._use = spec, what, use
        self._step = 0
        self._pending: Callable[[], list[Tensor]] | None = None

    def send(self, tensors: list[Tensor]) -> None:
        """Begin to send this step's results to the rank that asked."""
        self.take()
        assert self._spec.group is not None
        self._step += 1
        packed = pack(tensors)
        description = f"{self._what}, {packed.nbytes} bytes"
        arrived = channel_of(self._spec.group).rotate(packed, description, -self._step)
        self._pending = lambda: unpack(arrived(), tensors)

    def take(self) -> None:
        """Use what was asked of the rank that is as many steps on."""
        if self._pending is not None:
            self._use(self._pending())
            self._pending = None
