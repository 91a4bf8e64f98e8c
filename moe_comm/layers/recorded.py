"""Spans of backward passes, which autograd calls and no module can wrap."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

Gradients = tuple[Tensor | None, ...]


def recorded(backward: Callable[[Any, Tensor], Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """``backward`` of experts, of an autograd function whose ``ctx.call`` has their layer's ``label``."""

    @wraps(backward)
    def call(ctx: Any, grad: Tensor) -> Gradients:
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=ctx.call.label):
            return backward(ctx, grad)

    return call
