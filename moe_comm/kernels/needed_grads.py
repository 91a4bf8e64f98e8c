"""Which gradients a backward pass asks of a custom autograd function."""

from __future__ import annotations

from typing import Any

import torch


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """``ctx.needs_input_grad``, less what nobody asks for in this very backward pass.

    ``needs_input_grad`` says which inputs can have a gradient. A pipeline schedule that splits the backward runs a
    function twice, once for its rows' gradient and once for its weights', and would pay for both each time.
    """
    wanted, edges = list(ctx.needs_input_grad), iter(ctx.next_functions)
    for place, needs in enumerate(wanted):
        if needs:
            node = None
            while node is None:
                node = next(edges)[0]
            try:
                wanted[place] = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked for
                wanted[place] = True
    return tuple(wanted)
