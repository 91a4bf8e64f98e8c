"""What is around backward passes, which autograd calls and no module can wrap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import Tensor

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

Gradients = tuple[Tensor | None, ...]
Guard = Callable[[], AbstractContextManager[None]]
"""Makes what an exception passes on its way out; ``Dispatcher.abort_on_error`` is one."""


def recorded(backward: Callable[[Any, Tensor], Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """Record a span around ``backward`` of experts, and run it within ``ctx.call.guard``.

    Args:
        backward: of an autograd function whose ``ctx.call`` has their layer's ``label`` and a ``guard``.
    """

    @wraps(backward)
    def call(ctx: Any, grad: Tensor) -> Gradients:
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=ctx.call.label), ctx.call.guard():
            return backward(ctx, grad)

    return call
