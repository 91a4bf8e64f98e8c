"""A pending call of an MoE layer, and the statistics of a call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_comm.layers.parallel.interleave import Steps


@dataclass(frozen=True)
class DispatchStats:
    """Statistics of the (token, slot) pairs of one call. Summed over all ranks, etp * sent equals received.

    Attributes:
        slots: T * K of this rank.
        sent: slots that were dispatched to an expert. The other slots were dropped, or have no real expert.
        received: rows that this rank received for its experts or expert slices.
        dropped: slots that the capacity dropped, a scalar tensor; None without capacity.
    """

    slots: int
    sent: int
    received: int
    dropped: Tensor | None


class MoECall:
    """A pending call of an ``MoELayer``, returned by ``MoELayer.begin``. Each rank calls ``compute``, then ``result``:

        call = layer.begin(x)     dispatch starts
        ...                       other work: attention of another micro-batch, a parallel dense branch
        call.compute()            shared expert, while rows are in flight; then the experts
        ...                       other work
        y = call.result()         results are combined

    In backward, autograd runs the same operators in reverse order, so the other work hides the transfers there as well.
    """

    def __init__(self, steps: Steps[Tensor]) -> None:
        self._steps = steps
        next(steps)

    def compute(self) -> None:
        """Run the shared expert, and the experts on the rows as they complete; start to send the results."""
        next(self._steps)

    def result(self) -> Tensor:
        """Return what ``MoELayer.forward`` returns."""
        try:
            next(self._steps)
        except StopIteration as end:
            y: Tensor = end.value
            return y
        raise RuntimeError("MoECall.result was called before MoECall.compute")
