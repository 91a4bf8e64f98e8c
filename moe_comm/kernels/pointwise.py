"""Pointwise functions whose bits do not depend on an element's position in a tensor, or on the tensor's strides.

On a CPU, torch computes ``sigmoid``, ``silu``, ``gelu`` and others with one formula in vectors and with another one for
the last elements of each thread and for strided tensors, so the result for a token can change with the number of
tokens. ``torch.exp``, ``erf`` and ``tanh`` use one formula for all elements; negation, addition, multiplication and
division are correctly rounded. Functions composed of these have the same bits in every batch. A GPU uses
one formula for all elements.

Functions of users are not composed in this way: ``in_whole_vectors`` pads their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.autograd import once_differentiable

VECTOR = 64
"""Elements that torch's CPU loops process at once, at most: two vectors of AVX-512 in bf16."""
GRAIN = 32768
"""Elements from which torch divides a loop over threads (``at::internal::GRAIN_SIZE``)."""


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


def _silu(x: Tensor) -> Tensor:
    return sigmoid_values(x).mul_(x)


def _silu_slope(x: Tensor) -> Tensor:
    s = sigmoid_values(x)
    return (1.0 - s).mul_(x).add_(1.0).mul_(s)


def _gelu(x: Tensor) -> Tensor:
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


def _gelu_slope(x: Tensor) -> Tensor:
    density = (x * x).mul_(-0.5).exp_().mul_(x).mul_(1.0 / math.sqrt(2.0 * math.pi))
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5).add_(density)


_TANH_SCALE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gelu_tanh_inner(x: Tensor) -> Tensor:
    return (x * x).mul_(_CUBIC).add_(1.0).mul_(x).mul_(_TANH_SCALE).tanh_()


def _gelu_tanh(x: Tensor) -> Tensor:
    return _gelu_tanh_inner(x).add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    t = _gelu_tanh_inner(x)
    inner_slope = (x * x).mul_(3.0 * _CUBIC).add_(1.0).mul_(_TANH_SCALE)
    return (1.0 - t * t).mul_(x).mul_(inner_slope).add_(t).add_(1.0).mul_(0.5)


class _Pointwise(torch.autograd.Function):
    """A function and its derivative, both computed in at least fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.slope = slope
        ctx.save_for_backward(x)
        return value(_wide(x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.slope(_wide(x)).mul_(grad).to(x.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), of any shape and floating dtype; differentiable once."""
    return _Pointwise.apply(x, _silu, _silu_slope) if x.is_cpu else F.silu(x)


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU (arXiv 1606.08415), of any shape and floating dtype; differentiable once."""
    return _Pointwise.apply(x, _gelu, _gelu_slope) if x.is_cpu else F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with tanh in place of erf, of any shape and floating dtype; differentiable once."""
    if not x.is_cpu:
        return F.gelu(x, approximate="tanh")
    return _Pointwise.apply(x, _gelu_tanh, _gelu_tanh_slope)  # type: ignore[no-any-return]


def in_whole_vectors(fn: Callable[[Tensor], Tensor], x_RX: Tensor, width: int) -> Tensor:
    """Return ``fn(x_RX)`` for a function of torch's operators on rows, so that a row has the same bits in every batch.

    Rows of zeros are appended on a CPU until every thread of torch's loops has whole vectors of whole rows, and at
    least two rows: a view of one row's columns is contiguous, and torch then uses other kernels.

    Args:
        fn: maps [R, X] to [R, width], row by row.
    """
    if not x_RX.is_cpu:
        return fn(x_RX)
    rows = padded = x_RX.shape[0]
    while True:
        # Loops use as many threads as there are grains, except that of gelu, which uses all for fewer elements.
        threads = math.lcm(most := torch.get_num_threads(), max(min(most, -(-padded * width // GRAIN)), 1))
        step = threads * VECTOR // math.gcd(VECTOR, max(width, 1))
        if padded % step == 0 and padded != 1:
            break
        padded += (-padded % step) or step
    return fn(F.pad(x_RX, (0, 0, 0, padded - rows)) if padded > rows else x_RX.contiguous())[:rows]
