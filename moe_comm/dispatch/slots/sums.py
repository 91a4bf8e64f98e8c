"""The order of slots, and fused gathers and sums, with the bits of ``plain``.

Sums: the native core on CPUs, Triton on GPUs, else ``plain``. Order and gathers: Triton on GPUs, else torch. Gathers
and sums make one pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.dispatch.slots import plain
from moe_comm.kernels.native import core, for_triton, on_cpu
from moe_comm.runtime import memory
from moe_comm.runtime.memory import DTYPE_CODES, address, warm_rows


def order(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Same as ``plain.order_slots``; the order of slots without an expert may differ."""
    if not for_triton(ids_TK):
        return plain.order_slots(ids_TK, num_experts)
    from moe_comm.kernels.triton.slot_order import order_slots  # needs Triton

    return order_slots(ids_TK, num_experts)[:2]


def order_and_count(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return ``order`` and, on the CPU, the slots of each expert, dropped slots and invalid slots."""
    if not for_triton(ids_TK):
        order_S, place_TK = plain.order_slots(ids_TK, num_experts)  # queued before the counts, for which the CPU waits
        return order_S, place_TK, plain.count_slots(ids_TK, num_experts)[: num_experts + 2].tolist()
    from moe_comm.kernels.triton.slot_order import order_slots  # needs Triton

    order_S, place_TK, counts = order_slots(ids_TK, num_experts)
    return order_S, place_TK, counts.tolist()


def copy(x_TX: Tensor, place_TK: Tensor, order_R: Tensor) -> Tensor:
    """Return [R, X], the row of each slot, of any dtype. No autograd.

    Args:
        place_TK, order_R: As from ``order``, without slots that have no expert.
    """
    if x_TX.dim() != 2 or not for_triton(x_TX, place_TK):
        return memory.take(x_TX, order_R // place_TK.shape[1])
    from moe_comm.kernels.triton.rows import copy_rows  # needs Triton

    return copy_rows(_dense(x_TX), place_TK, order_R.shape[0])


def take(rows_RX: Tensor, index_N: Tensor) -> Tensor:
    """Return [N, X], the rows at ``index_N`` (int64), of any dtype. No autograd."""
    if rows_RX.dim() != 2 or not for_triton(rows_RX, index_N):
        return memory.take(rows_RX, index_N)
    from moe_comm.kernels.triton.rows import take_rows  # needs Triton

    return take_rows(_dense(rows_RX), index_N.contiguous())


def weighted_sum(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Same as ``plain.weighted_sum``."""
    native_supported = rows_RD.numel() and place_TK.numel() and rows_RD.dtype in DTYPE_CODES and rows_RD.is_contiguous()
    inputs = (rows_RD, place_TK) if weights_TK is None else (rows_RD, place_TK, weights_TK)
    if rows_RD.dtype in DTYPE_CODES and for_triton(*inputs):
        from moe_comm.kernels.triton import rows as on_gpu  # needs Triton

        wide_TK = None if weights_TK is None else weights_TK.to(torch.float32)
        return on_gpu.weighted_sum(_dense(rows_RD), place_TK.contiguous(), wide_TK)
    if not native_supported or not on_cpu(*inputs):
        return plain.weighted_sum(rows_RD, place_TK, weights_TK)
    (tokens, top_k), hidden = place_TK.shape, rows_RD.shape[1]
    place_TK = place_TK.contiguous()
    weights = None if weights_TK is None else weights_TK.to(torch.float32).contiguous()
    y_TD = warm_rows(tokens, hidden, rows_RD.dtype, rows_RD.device)
    core().weighted_sum(
        address(rows_RD, y_TD.dtype),
        address(place_TK, torch.int64),
        address(weights, torch.float32, (tokens, top_k)),
        address(y_TD, rows_RD.dtype),
        (tokens, top_k, hidden),
        DTYPE_CODES[rows_RD.dtype],
        torch.get_num_threads(),
    )
    return y_TD


def spread(
    grad_TD: Tensor, place_TK: Tensor, weights_TK: Tensor, num_rows: int, rows_RD: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return ``plain.spread`` and, if ``rows_RD`` is given, ``plain.weight_grad``."""
    rows_supported = rows_RD is None or rows_RD.dtype in DTYPE_CODES
    if grad_TD.dtype in DTYPE_CODES and rows_supported and for_triton(grad_TD, place_TK, weights_TK, rows_RD):
        from moe_comm.kernels.triton import rows as on_gpu  # needs Triton

        rows_RD = None if rows_RD is None else _dense(rows_RD)
        wide_TK = weights_TK.to(torch.float32)
        return on_gpu.spread(_dense(grad_TD), place_TK.contiguous(), wide_TK, num_rows, rows_RD)
    grad_RD = plain.spread(grad_TD, place_TK, weights_TK, num_rows)
    return grad_RD, None if rows_RD is None else plain.weight_grad(grad_TD, rows_RD, place_TK)


def _dense(rows_RX: Tensor) -> Tensor:
    """Return rows with unit stride. Others are copied, such as the gradient of ``sum()``, one expanded number."""
    return rows_RX if rows_RX.stride(1) == 1 or not rows_RX.numel() else rows_RX.contiguous()
