"""The operators for tensor-parallel linear layers as Triton kernels; the same contract as ``overlap.gather_matmul`` and
``overlap.matmul_scatter``, which say more about both.

forward    gather_matmul    one kernel                                              gather_matmul.py
           matmul_scatter   one kernel                                              matmul_scatter.py
backward   gather_matmul    rows of x set out again, grad @ weight scattered by one kernel meanwhile, then grad.T @ x
           matmul_scatter   one kernel that gathers grad for grad @ weight, and leaves it there for grad.T @ x

Every call is one turn (``memory.py``). Bits depend on the tile sizes, never on the number of programs or on who comes
first. Weight gradients are one product over the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.gpu.blocks import ALIGN
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.overlap.chunked import check_linear, exact_mm
from moe_comm.overlap.triton.gather_matmul import Gather
from moe_comm.overlap.triton.matmul_scatter import Scatter
from moe_comm.overlap.triton.memory import SymmetricMemory, memory_of
from moe_comm.overlap.triton.programs import DTYPES, Programs


def gather_matmul(
    x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, programs: Programs | None = None
) -> Tensor:
    """[W * S, N] = the ranks' rows in order of rank, times ``weight.T``. Collective; differentiable once.

    Args:
        x_SD: [S, D] this rank's rows; S, D and the dtype (fp32, bf16, fp16) are the same on every rank.
        weight_ND: [N, D] of the same dtype; the ranks' weights differ, and the gradient of x is summed over them.
        group: None is one rank.
        programs: the same on every rank; None takes what fits the device.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other.
        ConfigError: CPU tensors outside Triton's interpreter, or ranks on several hosts.
        RankMismatch: ranks differ.
        PeerTimeout: a rank did not raise its flag in time; the message names both. On a GPU it comes with a later
            call, or ``memory_of(...).check(wait=True)``, and what depends on that rank's rows is NaN.
    """
    check_linear(x_SD, weight_ND, "gather_matmul")
    return _GatherMatmul.apply(x_SD, weight_ND, _kernels(x_SD, group, programs))  # type: ignore[no-any-return]


def matmul_scatter(
    x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, programs: Programs | None = None
) -> Tensor:
    """[T / W, N] = this rank's rows of the sum over ranks of ``x @ weight.T``. Collective; differentiable once.

    Args:
        x_TK: [T, K] this rank's columns of all ranks' rows, in order of rank; T is a multiple of the ranks.
        weight_NK: [N, K] of the same dtype, this rank's columns of the whole weight.
        group, programs: as in ``gather_matmul``.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other, or T does not divide by the ranks.
        ConfigError, RankMismatch, PeerTimeout: as in ``gather_matmul``.
    """
    check_linear(x_TK, weight_NK, "matmul_scatter")
    kernels = _kernels(x_TK, group, programs)
    if x_TK.shape[0] % kernels.memory.world:
        raise InputError(f"matmul_scatter: {x_TK.shape[0]} rows do not divide evenly over {kernels.memory.world} ranks")
    return _MatmulScatter.apply(x_TK, weight_NK, kernels)  # type: ignore[no-any-return]


def reference_product(a_MK: Tensor, b_KN: Tensor, block_k: int) -> Tensor:
    """What a kernel's tiles compute, in plain torch: fp32, added up block of K after block of K, rounded once."""
    total_MN = a_MK.new_zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.float32)
    for first in range(0, a_MK.shape[1], block_k):
        total_MN += a_MK[:, first : first + block_k].float() @ b_KN[first : first + block_k].float()
    return total_MN.to(a_MK.dtype)


def _kernels(x: Tensor, group: ProcessGroup | None, programs: Programs | None) -> Kernels:
    return Kernels.of(group, x) if programs is None else Kernels.with_programs(group, x, programs)


@dataclass(frozen=True)
class Kernels:
    """The four passes without autograd. Every call is collective."""

    memory: SymmetricMemory
    programs: Programs

    @classmethod
    def of(cls, group: ProcessGroup | None, like: Tensor, moving: int | None = None) -> Kernels:
        """For tensors like ``like``, with what fits their device.

        Args:
            moving: programs that communicate; None: a share of those that the device has.

        Raises:
            InputError: the kernels do not take the dtype. ConfigError: CPU tensors outside Triton's interpreter, or
                more programs than fit.
        """
        return cls.with_programs(group, like, Programs.of(like.device, like.dtype, moving))

    @classmethod
    def with_programs(cls, group: ProcessGroup | None, like: Tensor, programs: Programs) -> Kernels:
        """As ``of``, with these."""
        if like.dtype not in DTYPES:
            raise InputError(f"the Triton operators take {', '.join(map(str, DTYPES))}; got {like.dtype}")
        return cls(memory_of(group, like.device), programs)

    def gather_matmul(self, x_SD: Tensor, w_ND: Tensor) -> Tensor:
        """[W * S, N]."""
        return self._gathered(x_SD.contiguous(), w_ND.t(), f"gather_matmul of {tuple(x_SD.shape)}", None)[0].flatten(
            0, 1
        )

    def gather_matmul_gradients(
        self, x_SD: Tensor, w_ND: Tensor, grad_TN: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of x and the weight; None where it is not wanted."""
        memory, programs = self.memory, self.programs
        x_SD, grad_TN = x_SD.contiguous(), grad_TN.contiguous()
        (rows, width), world, dtype = x_SD.shape, memory.world, x_SD.dtype
        if not (rows and width and (needs_x or needs_w)):
            return torch.zeros_like(x_SD) if needs_x else None, torch.zeros_like(w_ND) if needs_w else None
        grad_x = grad_w = None
        slots, tiles = Scatter.needs(rows, width, dtype, world, programs)
        slots = -(-slots // ALIGN) * ALIGN
        gathered, chunks = Gather.needs(rows, width, dtype, world, programs)
        tile_name, row_name = Scatter.names(rows, width, programs), Gather.names(rows, programs)

        def name(place: int) -> str:
            return tile_name(place) if place < tiles else row_name(place - tiles)

        description = f"gather_matmul backward of {tuple(x_SD.shape)} by {w_ND.shape[0]}"
        turn = memory.turn(slots + gathered, tiles + chunks, description, name)
        gather = Gather(memory, turn, programs, slots, tiles)
        if needs_w:
            gather.push(x_SD)
        if needs_x:
            grad_x = torch.empty_like(x_SD)
            Scatter(memory, turn, programs).multiply(grad_TN.unflatten(0, (world, rows)), w_ND, grad_x)
        if needs_w:
            gather.await_all(x_SD)
            grad_w = exact_mm(grad_TN.t(), gather.rows(x_SD).flatten(0, 1))
        memory.finish(turn)
        return grad_x, grad_w

    def matmul_scatter(self, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        """[T / W, N]."""
        memory, programs = self.memory, self.programs
        x_TK = x_TK.contiguous()
        world, rows, columns = memory.world, x_TK.shape[0] // memory.world, w_NK.shape[0]
        y_SN = x_TK.new_zeros(rows, columns) if not x_TK.numel() else x_TK.new_empty(rows, columns)
        if x_TK.numel() and columns:
            data_bytes, flags = Scatter.needs(rows, columns, x_TK.dtype, world, programs)
            description = f"matmul_scatter of {tuple(x_TK.shape)} by {columns}"
            turn = memory.turn(data_bytes, flags, description, Scatter.names(rows, columns, programs))
            Scatter(memory, turn, programs).multiply(x_TK.unflatten(0, (world, rows)), w_NK.t(), y_SN)
            memory.finish(turn)
        return y_SN

    def matmul_scatter_gradients(
        self, x_TK: Tensor, w_NK: Tensor, grad_SN: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of x and the weight; None where it is not wanted."""
        if not (needs_x or needs_w):
            return None, None
        description = f"matmul_scatter backward of {tuple(x_TK.shape)}"
        b_NK = w_NK if needs_x else w_NK[:, :0]
        grad_WSK, grad_w = self._gathered(grad_SN.contiguous(), b_NK, description, x_TK if needs_w else None)
        return grad_WSK.flatten(0, 1) if needs_x else None, grad_w

    def _gathered(
        self, x_SD: Tensor, b_DN: Tensor, description: str, other_TK: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[W, S, N] = gathered x @ b, and [D, K] = gathered x.T @ other."""
        memory, programs = self.memory, self.programs
        (rows, inner), columns, world = x_SD.shape, b_DN.shape[1], memory.world
        y_WSN = x_SD.new_empty(world, rows, columns)
        if not rows * inner or not (columns or other_TK is not None):
            return y_WSN.zero_(), None if other_TK is None else x_SD.new_zeros(inner, other_TK.shape[1])
        data_bytes, flags = Gather.needs(rows, inner, x_SD.dtype, world, programs)
        turn = memory.turn(data_bytes, flags, f"{description} by {columns}", Gather.names(rows, programs))
        gather = Gather(memory, turn, programs)
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


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.kernels = kernels
        return kernels.gather_matmul(x_SD, w_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Kernels = ctx.kernels
        (x_SD, w_ND), (needs_x, needs_w) = ctx.saved_tensors, wanted_gradients(ctx)[:2]
        return *kernels.gather_matmul_gradients(x_SD, w_ND, grad_TN, needs_x, needs_w), None


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.kernels = kernels
        return kernels.matmul_scatter(x_TK, w_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Kernels = ctx.kernels
        (x_TK, w_NK), (needs_x, needs_w) = ctx.saved_tensors, wanted_gradients(ctx)[:2]
        return *kernels.matmul_scatter_gradients(x_TK, w_NK, grad_SN, needs_x, needs_w), None
