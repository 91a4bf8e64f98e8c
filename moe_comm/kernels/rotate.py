"""Rotary position embedding (arXiv 2104.09864): rotates the halves of each head by the angles of its token.

    y1 = x1 cos - x2 sin      x1, x2: halves of a head
    y2 = x2 cos + x1 sin

One pass over memory in the native core for fp32 on the CPU, with any strides; otherwise plain torch, with the same
bits. Backward is the inverse rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.native import core, on_cpu
from moe_comm.runtime.memory import address, row_address


def rotate_halves(x_BShd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, heads, d] by each token's angles.

    Args:
        x_BShd: [B, S, heads, d].
        cos, sin: [B or 1, S, d / 2]; they get no gradient.
    """
    fits = x_BShd.dtype == cos.dtype == sin.dtype == torch.float32 and x_BShd.stride(-1) == 1 and x_BShd.numel()
    if fits and on_cpu(x_BShd, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        return _Rotate.apply(x_BShd, cos.contiguous(), sin.contiguous())  # type: ignore[no-any-return]
    return rotate_halves_reference(x_BShd, cos, sin)


def rotate_halves_reference(x_BShd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``rotate_halves`` in plain torch."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x_BShd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rotate(x_BShd: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    angles = *cos.shape[:1], x_BShd.shape[1], x_BShd.shape[3] // 2
    y_BShd = torch.empty(x_BShd.shape, dtype=x_BShd.dtype, device="cpu")
    core().rotate(
        row_address(x_BShd, torch.float32)[0],
        x_BShd.stride()[:3],
        address(y_BShd, torch.float32),
        address(cos, torch.float32, angles),
        address(sin, torch.float32, angles),
        cos.shape[0] * cos.shape[1],
        sign,
        tuple(x_BShd.shape),
        torch.get_num_threads(),
    )
    return y_BShd


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BShd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x_BShd, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BShd: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_BShd = grad_BShd if grad_BShd.stride(-1) == 1 else grad_BShd.contiguous()
        return _rotate(grad_BShd, cos, sin, -1.0), None, None
