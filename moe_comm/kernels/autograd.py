"""Rules of the operators' autograd functions: autocast, needed gradients, accumulation dtype, no second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable as torch_once_differentiable

from moe_comm.errors import InputError
from moe_comm.runtime.memory import materialized

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Return ``backward`` of an autograd function without autograd, for gradients with their values in memory.

    With ``create_graph``, a derivative of the results raises InputError. ``torch``'s decorator of this name returns
    results without history unless a gradient that it is given has one, so terms of a second derivative would be missing
    without an error.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():  # it can trace torch's decorator, but not the dispatch keys of tensors
            return torch_once_differentiable(backward)(ctx, *grads)
        values = []
        for grad in grads:  # a generator is slower
            values.append(materialized(grad) if isinstance(grad, Tensor) else grad)
        with torch.no_grad():
            results = backward(ctx, *values)
        if not torch.is_grad_enabled():  # no create_graph
            return results
        if isinstance(results, tuple):
            return tuple(map(_raising, results))
        return _raising(results)

    return wrapped


def _raising(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    return _Raising.apply(result.detach().requires_grad_())


class _Raising(torch.autograd.Function):
    """Identity whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise InputError(
            "an operator of moe_comm was differentiated twice (create_graph=True, such as a gradient penalty); "
            "it has first derivatives only (once_differentiable)"
        )


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


def parameters_among(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the parameters, for ``with_main_grads``; None for other tensors."""
    return [t if isinstance(t, nn.Parameter) else None for t in tensors]


def with_main_grads(saved: Sequence[Any], parameters: Sequence[Tensor | None]) -> list[Any]:
    """Return saved tensors, or the parameters that have an attribute ``main_grad``.

    Activation checkpointing and other hooks of saved tensors return tensors without the attributes of parameters.
    """
    return [p if hasattr(p, "main_grad") else t for t, p in zip(saved, parameters, strict=True)]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a GEMM with ``x``: the autocast dtype if autocast is enabled, else that of ``x``.

    float64 stays float64, as in torch's autocast.
    """
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast_parameter(p: Tensor, x: Tensor) -> Tensor:
    """Return ``p`` in ``compute_dtype(x)`` under autocast; without autocast return ``p``."""
    if not torch.is_autocast_enabled(x.device.type) or p.dtype == torch.float64:
        return p
    return p.to(compute_dtype(x))


def without_autocast(x: Tensor) -> Any:
    """Return a context in which autocast is disabled for the device of ``x``.

    If it is disabled already, the context does nothing, because entering one takes as long as a small GEMM.
    """
    kind = x.device.type
    disabled = kind == "meta" or not torch.is_autocast_enabled(kind)
    return _NOTHING if disabled else torch.autocast(kind, enabled=False)


_NOTHING = nullcontext()


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_in_rank_order(parts_W: Tensor) -> Tensor:
    """Sum over the first dimension in rank order, in the accumulation dtype, rounded once; exact for integers."""
    wide = accumulate_dtype(parts_W.dtype) if parts_W.is_floating_point() else torch.int64
    total = parts_W[0].to(wide, copy=True)
    for part in parts_W[1:]:
        total += part
    return total.to(parts_W.dtype)
