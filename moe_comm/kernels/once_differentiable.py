"""Backward passes of the operators of this library, which have no derivative of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as torch_once_differentiable

from moe_comm.errors import InputError
from moe_comm.tensor_memory import materialized

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Return ``backward`` of an autograd function without autograd, for gradients with their values in memory.

    With ``create_graph``, a derivative of the results raises InputError. ``torch``'s decorator of this name returns
    results without history unless a gradient that it is given has one, so terms of a second derivative would be missing
    without an error.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # a compiler can trace torch's decorator, but not the dispatch keys of tensors
            return torch_once_differentiable(backward)(ctx, *grads)
        grads = tuple(materialized(grad) if isinstance(grad, Tensor) else grad for grad in grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
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
