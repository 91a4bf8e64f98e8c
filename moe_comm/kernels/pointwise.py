"""Sigmoid whose bits do not depend on an element's position in the tensor.

On a CPU, ``torch.sigmoid`` and ``silu`` use a different formula for the last elements of each thread, so the result for
a token can change with the number of tokens. ``torch.exp`` uses one formula for all elements, and negation, addition
and division are correctly rounded. Composed of these, the sigmoid of an element has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.once_differentiable import once_differentiable


def sigmoid_values(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in the dtype of ``x``, without autograd. If exp overflows to inf, the result is 0."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = sigmoid_values(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return grad * ((1.0 - y) * y)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of ``x``, of any shape and floating dtype; differentiable once."""
    return _Sigmoid.apply(x)  # type: ignore[no-any-return]
