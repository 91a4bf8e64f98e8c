"""Serial references of the operators, and settings of the collectives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, group_size
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import grouped
from moe_comm.kernels.autograd import sum_in_rank_order
from moe_comm.kernels.expert_mlp import ExpertLinear
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.executors.transport import RowDispatch
from moe_comm.overlap.options import Overlap

TRANSPORTS = (CollectiveOptions(), CollectiveOptions(shared_memory=False, checked=True))
"""Collectives over shared memory, and over the group's backend."""
OVERLAPS = (*(Overlap(chunks, 1) for chunks in (1, 2, 3, 16)), Overlap(2, 1, deterministic=False))


def gather_reference(x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute ``gather_matmul`` serially."""
    gathered = (
        x_SD
        if group is None or group_size(group) == 1
        else channel_of(group).all_gather(x_SD, "a gather").flatten(0, 1)
    )
    return row_invariant_mm(gathered, w_ND.t())


def scatter_reference(x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute ``matmul_scatter`` serially."""
    return sum_in_rank_order(_swapped(_by_rank(row_invariant_mm(x_TK, w_NK.t()), group), group))


def matmul_swap_reference(x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute ``matmul_swap`` serially."""
    parts_WSn = torch.stack([row_invariant_mm(x_SD, w.t()) for w in w_ND.chunk(group_size(group))])
    return _swapped(parts_WSn, group).flatten(0, 1)


def swap_matmul_reference(x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """Compute ``swap_matmul`` serially."""
    return row_invariant_mm(_swapped(_by_rank(x_TK, group), group).movedim(0, 1).flatten(1), w_NK.t())


def _by_rank(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return x.unflatten(0, (group_size(group), x.shape[0] // group_size(group)))


def _swapped(parts_W: Tensor, group: ProcessGroup | None) -> Tensor:
    return parts_W if group is None or group_size(group) == 1 else channel_of(group).swap(parts_W, "a swap")


def dispatch_reference(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, w_EGD: Tensor) -> Tensor:
    """Compute ``dispatch_matmul`` serially."""
    dispatched = dispatcher.dispatch(x_TD, ids_TK)
    return grouped(ExpertLinear((w_EGD,)), dispatched.rows_RD, dispatched.handle.rows_per_expert)


def combine_reference(rows_RF: Tensor, w_EDF: Tensor, weights_TK: Tensor, dispatch: RowDispatch) -> Tensor:
    """Compute ``matmul_combine`` serially."""
    results_RD = grouped(ExpertLinear((w_EDF,)), rows_RF, dispatch.handle.rows_per_expert)
    return dispatch.dispatcher.combine(results_RD, weights_TK, dispatch.handle)
