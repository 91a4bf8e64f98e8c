"""One call of an MoE layer in three parts, between which other work can hide what is under way.

    call = layer.begin(x)     tokens leave for their experts
    ...                       other work: attention of another micro-batch, a dense branch beside the experts
    call.compute()            the shared expert, while tokens are under way; then the experts
    ...                       other work
    y = call.result()         results have come back, and are summed

Autograd runs the same other work between the same parts in backward, in the other order: it goes by when an operator
ran in forward.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from moe_comm.dispatch.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Dispatched, Layout
from moe_comm.kernels.autocast import compute_dtype
from moe_comm.layers.collectives import group_size
from moe_comm.layers.data_parallel.attach import gradients_of
from moe_comm.layers.grouped_mlp import grouped_mlp
from moe_comm.layers.losses import attach_loss
from moe_comm.layers.router import Routing
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.experts import ExpertFlight, MLPWeights
from moe_comm.overlap.passage import overlaps
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

if TYPE_CHECKING:
    from moe_comm.layers.moe import MoELayer


class SerialFlight:
    """``ExpertFlight`` one step after the other: nothing is under way between the calls; ``thread`` holds the rows."""

    def __init__(self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor) -> None:
        self._dispatcher, self._weights_TK = dispatcher, weights_TK
        self.thread, self.layout = dispatched.rows_RD, dispatched.layout

    def compute(self, weights: MLPWeights) -> None:
        """Run the experts."""
        sizes, alloc, label = self.layout.rows_per_expert, self._dispatcher.empty_rows, self.layout.label
        rows_RD, again = self.thread.to(compute_dtype(self.thread)), weights.recompute
        guard = partial(self._dispatcher.abort_on_error, label)  # not of this object, which holds the output
        self.thread = grouped_mlp(rows_RD, sizes, *weights.tensors, weights.activation, alloc, again, label, guard)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an exception in the ``with`` block; they would wait for this one."""
        return self._dispatcher.abort_on_error(self.layout.label)

    def result(self) -> Tensor:
        """Bring the results back."""
        return self._dispatcher.combine(self.thread, self._weights_TK, self.layout)


Flight = ExpertFlight | SerialFlight


def begin_flight(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    overlap: Overlap | None,
    *,
    width: int,
    label: str,
) -> Flight:
    """Send rows to their experts of ``width`` F: in flight if asked to overlap, if the dispatcher can, and if there are
    enough of them that it pays; else at once."""
    if overlap is not None and isinstance(dispatcher, AllToAllDispatcher) and overlaps(dispatcher):
        passage = ExpertFlight.agree(dispatcher, x_TD, ids_TK, weights_TK, overlap, width=width, label=label)
        if passage.small:
            return SerialFlight(dispatcher, passage.dispatch_at_once(x_TD), weights_TK)
        return ExpertFlight.over(passage, x_TD, weights_TK)
    return SerialFlight(dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=label), weights_TK)


@dataclass(eq=False)
class MoECall:
    """What ``MoELayer.begin`` returns. Every rank calls ``compute`` and then ``result``, once each."""

    layer: MoELayer
    x: Tensor
    x_TD: Tensor
    routing: Routing
    flight: Flight
    identity_T1: Tensor | None
    chunks: int | None
    shared_TD: Tensor | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def layout(self) -> Layout:
        """Of the rows under way."""
        return self.flight.layout

    def compute(self) -> None:
        """Run the shared expert, and the experts on the rows as they arrive; let the results leave."""
        layer = self.layer
        with self.flight.abort_on_error():
            if layer.shared is not None:
                self.shared_TD = layer.shared(self.x_TD)
            with EVENTS.span(Kind.COMPUTE, "experts", layer=layer.label):
                # Call the module, so that its hooks run: FSDP gathers the weights in one.
                self.flight.thread = layer.experts(self.flight.thread, self.flight)

    def result(self) -> Tensor:
        """[..] in the shape of ``x``: what ``MoELayer.forward`` gives."""
        layer, routing = self.layer, self.routing
        y_TD = self.flight.result()
        if layer.running is not None and self.chunks is not None:
            layer.running.took(time.perf_counter() - self.begun, self.chunks)
        if self.identity_T1 is not None and layer.zero_experts.identity:
            y_TD = (y_TD.to(self.identity_T1.dtype) + self.identity_T1 * self.x_TD.to(y_TD.dtype)).to(y_TD.dtype)
        if self.shared_TD is not None:
            y_TD = y_TD + self.shared_TD
        if routing.aux_loss is not None and routing.aux_loss.requires_grad:
            y_TD = attach_loss(y_TD, routing.aux_loss, layer.aux_scale * self._copies_averaged())
        return y_TD.view(self.x.shape)

    def _copies_averaged(self) -> int:
        """Each rank's gradient has a part of that of an auxiliary loss over all ranks' tokens. Under DDP and FSDP2 the
        mean of the parts is taken where their sum is needed."""
        gradients = gradients_of(self.layer.experts)
        return group_size(self.layer.router.group) if gradients is not None and gradients.averaged else 1
