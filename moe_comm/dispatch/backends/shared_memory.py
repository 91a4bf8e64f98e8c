"""``shared_memory``: CPU ranks of one host move rows straight into each other's heaps.

Each row is gathered once from the caller's tensor to its final place at the owner of its expert; combine reads the
owners' output rows where they lie. The protocol is in csrc/cpu/communicator.h, the copying in csrc/cpu/transfer.h.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.header import Header
from moe_comm.comm.meeting import heap_of
from moe_comm.comm.shared_heap import SharedOptions
from moe_comm.dispatch.backends.native import ArrivingRows, LeavingRows, NativeRows
from moe_comm.dispatch.base import ID_DTYPES, Dispatcher
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.errors import InputError, MoeCommError, RoutingError
from moe_comm.runtime.memory import DTYPE_CODES
from moe_comm.topology import ExpertPlacement


class SharedMemoryDispatcher(Dispatcher):
    """CPU ranks on one host; zero-copy. Construction is collective over ``group``."""

    name = "shared_memory"

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup,
        rank: int,
        options: DispatchOptions | None = None,
        shared: SharedOptions | None = None,
    ) -> None:
        super().__init__(placement, group, rank, options)
        assert self.comm is not None
        self.shared = heap_of(self.comm, self.options.timeout_s, shared)
        self._rows = NativeRows(self.shared.heap, placement.offsets, rank, self.comm, self.options.timeout_s)

    def release(self) -> None:
        del self.shared, self._rows

    def set_step(self, step: int) -> None:
        """Tell the training step, for the reports that errors carry."""
        self.shared.communicator.set_step(step)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A block of this rank's heap, which peers read in place; for rows it does not move, what torch gives."""
        if device.type != "cpu" or dtype not in DTYPE_CODES:
            return super().empty_rows(num_rows, width, dtype, device)
        return self._rows.empty_rows(num_rows, width, dtype)

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> ArrivingRows:
        """A dispatch whose rows may still be on their way; as all three ``start_*``, without autograd, and what it
        returns has to be entered and left (``with``) before the group does anything else."""
        if header.fault is None:
            x_TD = rounded(x_TD, self.options.wire_dtypes.of(header.op))
        return self._rows.start_send(x_TD, ids_TK, header)

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle, header: Header) -> LeavingRows:
        """A combine, or a dispatch's backward, of rows that are computed meanwhile, into a block of ``empty_rows``."""
        return self._rows.start_sum(rows_RD, handle, header)

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[ArrivingRows, Tensor | None]:
        """A combine's backward whose rows may still be on their way. The weights' gradient [T, K] is there."""
        grad_TD = rounded(grad_TD, self.options.wire_dtypes.of(header.op))
        return self._rows.start_spread(grad_TD, rows_RD, weights_TK, handle, header)

    @property
    def handshakes(self) -> bool:
        """Headers are compared in shared memory, in every operation."""
        return True

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        shape, ids_shape = x_TD.shape, ids_TK.shape
        fits = len(shape) == len(ids_shape) == 2 and shape[0] == ids_shape[0] and ids_shape[1] > 0
        if fits and x_TD.is_cpu and ids_TK.is_cpu and x_TD.dtype in DTYPE_CODES and ids_TK.dtype in ID_DTYPES:
            return None  # what follows finds nothing, and takes longer; ids out of range are found while counting
        if not x_TD.is_cpu or x_TD.dtype not in DTYPE_CODES:
            return InputError(
                f"shared_memory moves float32, bfloat16 and float16 rows on the CPU; got {x_TD.dtype} on {x_TD.device}"
            )
        return super()._fault(x_TD, ids_TK)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        return None

    def own_rows(self, handle: DispatchHandle, leaving: int) -> int:
        own: int = handle.state.own
        return own

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        return self._rows.send(x_TD, ids_TK, header)

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        return self._rows.sum(rows_RD, weights_TK, handle, header)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        return self._rows.spread(grad_TD, rows_RD, weights_TK, handle, header)
