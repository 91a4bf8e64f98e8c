"""The operators for tensor-parallel linear layers as Triton kernels, with the contracts of ``overlap.gather_matmul``
and ``overlap.matmul_scatter``.

forward    gather_matmul    one kernel                                              gather_matmul.py
           matmul_scatter   one kernel                                              matmul_scatter.py
backward   gather_matmul    pushes rows of x again; one kernel for grad @ weight and its sum; then grad.T @ x
           matmul_scatter   one kernel that gathers grad for grad @ weight and keeps it for grad.T @ x

Each call is one turn (``memory.py``). The bits depend on the tile sizes, not on the number of programs or on timing.
Weight gradients are one GEMM over the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.gpu.blocks import ALIGN
from moe_comm.kernels.autograd import needed_gradients, once_differentiable
from moe_comm.kernels.triton.launch import DTYPES
from moe_comm.overlap.chunked import check_linear, exact_mm
from moe_comm.overlap.triton.gather_matmul import TritonGather
from moe_comm.overlap.triton.matmul_scatter import TritonScatter
from moe_comm.overlap.triton.memory import SymmetricMemory, memory_of
from moe_comm.overlap.triton.programs import Programs


def gather_matmul(
    x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, programs: Programs | None = None
) -> Tensor:
    """Run ``overlap.gather_matmul`` as Triton kernels. Collective; differentiable once.

    Args:
        x_SD: [S, D] as for ``overlap.gather_matmul``; fp32, bf16 or fp16.
        weight_ND: [N, D] of the same dtype.
        group: Process group; None for one rank.
        programs: Programs and tile sizes, the same on every rank; None: the default for the device.

    Returns:
        [W * S, N] all ranks' rows in rank order, times this rank's ``weight.T``.

    Raises:
        InputError: shapes, dtypes or devices do not match.
        ConfigError: CPU tensors outside Triton's interpreter, or ranks on several hosts.
        RankMismatch: the ranks' arguments differ.
        PeerTimeout: a rank did not raise its flag in time. On a GPU a later call or ``memory_of(...).check(wait=True)``
            raises it, and results that depend on that rank's rows are NaN.
    """
    check_linear(x_SD, weight_ND, "gather_matmul")
    return _FusedLinear.apply(x_SD, weight_ND, _kernels(x_SD, group, programs), "gather_matmul")  # type: ignore[no-any-return]


def matmul_scatter(
    x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, programs: Programs | None = None
) -> Tensor:
    """Run ``overlap.matmul_scatter`` as Triton kernels. Arguments and errors as in ``gather_matmul``.

    Returns:
        [T / W, N] this rank's rows of the sum over ranks of ``x @ weight.T``.
    """
    check_linear(x_TK, weight_NK, "matmul_scatter")
    kernels = _kernels(x_TK, group, programs)
    if x_TK.shape[0] % kernels.memory.world:
        raise InputError(f"matmul_scatter: {x_TK.shape[0]} rows do not divide evenly over {kernels.memory.world} ranks")
    return _FusedLinear.apply(x_TK, weight_NK, kernels, "matmul_scatter")  # type: ignore[no-any-return]


def _kernels(x: Tensor, group: ProcessGroup | None, programs: Programs | None) -> LinearKernels:
    return LinearKernels.of(group, x) if programs is None else LinearKernels.with_programs(group, x, programs)


@dataclass(frozen=True)
class LinearKernels:
    """The four passes without autograd. All calls are collective."""

    memory: SymmetricMemory
    programs: Programs

    @classmethod
    def of(cls, group: ProcessGroup | None, like: Tensor, moving: int | None = None) -> LinearKernels:
        """Return the kernels for tensors like ``like``, with the default sizes for their device.

        Args:
            moving: Programs that communicate; None: the default.

        Raises:
            InputError: the kernels do not support the dtype.
            ConfigError: CPU tensors outside Triton's interpreter, or more programs than the device can hold.
        """
        return cls.with_programs(group, like, Programs.of(like.device, like.dtype, moving))

    @classmethod
    def with_programs(cls, group: ProcessGroup | None, like: Tensor, programs: Programs) -> LinearKernels:
        """Return the kernels for tensors like ``like``, with ``programs``."""
        if like.dtype not in DTYPES:
            raise InputError(f"the Triton operators support {', '.join(map(str, DTYPES))}; got {like.dtype}")
        return cls(memory_of(group, like.device), programs)

    def gather_matmul(self, x_SD: Tensor, w_ND: Tensor) -> Tensor:
        """Return [W * S, N]."""
        y_WSN, _ = self._gathered(x_SD.contiguous(), w_ND.t(), f"gather_matmul of {tuple(x_SD.shape)}", None)
        return y_WSN.flatten(0, 1)

    def gather_matmul_gradients(
        self, x_SD: Tensor, w_ND: Tensor, grad_TN: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and the weight; None for a gradient that is not needed."""
        memory, programs = self.memory, self.programs
        x_SD, grad_TN = x_SD.contiguous(), grad_TN.contiguous()
        (rows, width), world, dtype = x_SD.shape, memory.world, x_SD.dtype
        if not (rows and width and (needs_x or needs_w)):
            return torch.zeros_like(x_SD) if needs_x else None, torch.zeros_like(w_ND) if needs_w else None
        grad_x = grad_w = None
        slot_bytes, tile_flags = TritonScatter.needs(rows, width, dtype, world, programs)
        slot_bytes = -(-slot_bytes // ALIGN) * ALIGN
        row_bytes, chunk_flags = TritonGather.needs(rows, width, dtype, world, programs)
        tile_name, row_name = TritonScatter.names(rows, width, programs), TritonGather.names(rows, programs)

        def name(index: int) -> str:
            return tile_name(index) if index < tile_flags else row_name(index - tile_flags)

        description = f"gather_matmul backward of {tuple(x_SD.shape)} by {w_ND.shape[0]}"
        turn = memory.turn(slot_bytes + row_bytes, tile_flags + chunk_flags, description, name)
        gather = TritonGather(memory, turn, programs, slot_bytes, tile_flags)
        if needs_w:
            gather.push(x_SD)
        if needs_x:
            grad_x = torch.empty_like(x_SD)
            TritonScatter(memory, turn, programs).multiply(grad_TN.unflatten(0, (world, rows)), w_ND, grad_x)
        if needs_w:
            gather.await_all(x_SD)
            grad_w = exact_mm(grad_TN.t(), gather.rows(x_SD).flatten(0, 1))
        memory.finish(turn)
        return grad_x, grad_w

    def matmul_scatter(self, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        """Return [T / W, N]."""
        memory, programs = self.memory, self.programs
        x_TK = x_TK.contiguous()
        world, rows, columns = memory.world, x_TK.shape[0] // memory.world, w_NK.shape[0]
        y_SN = x_TK.new_zeros(rows, columns) if not x_TK.numel() else x_TK.new_empty(rows, columns)
        if x_TK.numel() and columns:
            data_bytes, flags = TritonScatter.needs(rows, columns, x_TK.dtype, world, programs)
            description = f"matmul_scatter of {tuple(x_TK.shape)} by {columns}"
            turn = memory.turn(data_bytes, flags, description, TritonScatter.names(rows, columns, programs))
            TritonScatter(memory, turn, programs).multiply(x_TK.unflatten(0, (world, rows)), w_NK.t(), y_SN)
            memory.finish(turn)
        return y_SN

    def matmul_scatter_gradients(
        self, x_TK: Tensor, w_NK: Tensor, grad_SN: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and the weight; None for a gradient that is not needed."""
        if not (needs_x or needs_w):
            return None, None
        description = f"matmul_scatter backward of {tuple(x_TK.shape)}"
        b_NK = w_NK if needs_x else w_NK[:, :0]
        grad_WSK, grad_w = self._gathered(grad_SN.contiguous(), b_NK, description, x_TK if needs_w else None)
        return grad_WSK.flatten(0, 1) if needs_x else None, grad_w

    def _gathered(
        self, x_SD: Tensor, b_DN: Tensor, description: str, other_TK: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [W, S, N] = gathered x @ b, and [D, K] = gathered x.T @ other."""
        memory, programs = self.memory, self.programs
        (rows, inner), columns, world = x_SD.shape, b_DN.shape[1], memory.world
        y_WSN = x_SD.new_empty(world, rows, columns)
        if not rows * inner or not (columns or other_TK is not None):
            return y_WSN.zero_(), None if other_TK is None else x_SD.new_zeros(inner, other_TK.shape[1])
        data_bytes, flags = TritonGather.needs(rows, inner, x_SD.dtype, world, programs)
        turn = memory.turn(data_bytes, flags, f"{description} by {columns}", TritonGather.names(rows, programs))
        gather = TritonGather(memory, turn, programs)
        if columns:
            gather.multiply(x_SD, b_DN, y_WSN)
        else:
            gather.push(x_SD)
            gather.await_all(x_SD)
        product = None
        if other_TK is not None:
            product = exact_mm(gather.rows(x_SD).flatten(0, 1).t(), other_TK)
        memory.finish(turn)
        return y_WSN, product


class _FusedLinear(torch.autograd.Function):
    """``name``: the method of ``LinearKernels`` for the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, kernels: LinearKernels, name: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.gradients = getattr(kernels, f"{name}_gradients")
        y: Tensor = getattr(kernels, name)(x, w)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients(*ctx.saved_tensors, grad, *needed_gradients(ctx)[:2]), None, None
