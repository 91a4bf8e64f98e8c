"""``shared_memory``: CPU ranks of one host copy rows directly into each other's heaps.

Dispatch copies each row once, from the caller's tensor to its final position at the owner of its expert. Combine reads
the output rows of the owners in place. csrc/cpu/communicator.h defines the protocol, csrc/cpu/transfer.h the copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import heap_of
from moe_comm.comm.header import Header
from moe_comm.comm.shared_heap import SharedOptions
from moe_comm.dispatch.backends.native import NativeRows
from moe_comm.dispatch.input_faults import ID_DTYPES
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingDispatcher
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.dispatch.wire.wire_dtype import rounded
from moe_comm.errors import InputError, MoeCommError
from moe_comm.runtime.memory import DTYPE_CODES
from moe_comm.topology import ExpertPlacement


class SharedMemoryDispatcher(PendingDispatcher):
    """Zero-copy transfer between CPU ranks of one host. Construction is collective over ``group``."""

    name = "shared_memory"
    checks_ids = True  # the native core checks
    collectives_in_flight = False

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
        for name in ("shared", "_rows"):  # absent if construction failed
            self.__dict__.pop(name, None)

    def set_step(self, step: int) -> None:
        """Set the training step that error reports show."""
        self.shared.communicator.set_step(step)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a block of this rank's heap, which peers read in place. Other dtypes and devices get a new tensor."""
        if device.type != "cpu" or dtype not in DTYPE_CODES:
            return super().empty_rows(num_rows, width, dtype, device)
        return self._rows.empty_rows(num_rows, width, dtype)

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> IncomingRows:
        wire_dtype = self.options.wire_dtypes.of(header.op)
        if header.fault is None and not (header.scaled and wire_dtype.format == "fp8"):
            x_TD = rounded(x_TD, wire_dtype)
        return self._rows.start_send(x_TD, ids_TK, header)

    def rows_by_source(self, incoming: IncomingRows) -> npt.NDArray[np.int64]:
        return np.frombuffer(incoming.handle.state.counts, np.int64).reshape(self.world, -1)

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle, header: Header) -> OutgoingRows:
        return self._rows.start_sum(rows_RD, handle, header)

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[IncomingRows, Tensor | None]:
        grad_TD = rounded(grad_TD, self.options.wire_dtypes.of(header.op))
        return self._rows.start_spread(grad_TD, rows_RD, weights_TK, handle, header)

    @property
    def handshakes(self) -> bool:
        """True: every operation compares headers in shared memory."""
        return True

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        shape, ids_shape = x_TD.shape, ids_TK.shape
        fits = len(shape) == len(ids_shape) == 2 and shape[0] == ids_shape[0] and ids_shape[1] > 0
        if fits and x_TD.is_cpu and ids_TK.is_cpu and x_TD.dtype in DTYPE_CODES and ids_TK.dtype in ID_DTYPES:
            return None  # fast path; the native core checks the range of ids when it counts slots
        if not x_TD.is_cpu or x_TD.dtype not in DTYPE_CODES:
            return InputError(
                f"shared_memory moves float32, bfloat16 and float16 rows on the CPU; got {x_TD.dtype} on {x_TD.device}"
            )
        return super()._fault(x_TD, ids_TK)

    def own_rows(self, handle: DispatchHandle, sent: int) -> int:
        own: int = handle.state.own
        return own

    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, DispatchHandle]:
        return self._rows.send(x_TD, ids_TK, header)[:2]

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle, header: Header) -> Tensor:
        return self._rows.sum(rows_RD, weights_TK, handle, header)

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        return self._rows.spread(grad_TD, rows_RD, weights_TK, handle, header)[:2]

    def _send_with(
        self, x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor, header: Header
    ) -> tuple[Tensor, DispatchHandle, Tensor | None]:
        return self._rows.send(x_TD, ids_TK, header, words_TKX)

    def _spread_with(
        self, grad_TD: Tensor, weights_TK: Tensor, words_TKX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor, Tensor]:
        rows_RD, _, words_RX = self._rows.spread(grad_TD, None, weights_TK, handle, header, words_TKX)
        assert words_RX is not None
        return rows_RD, words_RX

    def _sum_with(
        self, rows_RD: Tensor | None, words_RX: Tensor, handle: DispatchHandle, header: Header
    ) -> tuple[Tensor | None, Tensor]:
        return self._rows.sum_with(rows_RD, words_RX, handle, header)
