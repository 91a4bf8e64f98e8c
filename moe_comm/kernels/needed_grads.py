"""Whether autograd records an operation, and which gradients the current backward pass needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return ``ctx.needs_input_grad`` without the gradients that the current backward pass does not use.

    ``needs_input_grad`` lists the inputs that can have a gradient. A pipeline schedule with split backward runs a
    function twice, once for the gradient of the rows and once for those of the weights, and would compute both each
    time.
    """
    needed, edges = list(ctx.needs_input_grad), iter(ctx.next_functions)
    for index, needs in enumerate(needed):
        if needs:
            node = None
            while node is None:
                node = next(edges)[0]
            try:
                needed[index] = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # raised for a leaf that is an input of torch.autograd.grad
                needed[index] = True
    return tuple(needed)
