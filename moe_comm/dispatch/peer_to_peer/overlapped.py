"""Operations of ``peer_to_peer`` that run concurrently with the caller's GEMMs, and set a flag for each part.

    separate stream    meet ▸ push / spread ───── flags (expert, source) ──▶ a GEMM that waits for rows
    separate stream    meet ▸ ready ▸ sum ▸ ... ▸ done     a GEMM ──────── flags (slice of columns, owner) ──▶ ready

The kernels of the caller are in ``overlap/triton``. A turn is one operation of all ranks; see csrc/cuda/args.h. Kernels
of this module wait with one thread block, so the GEMM of the caller always has processors to run on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.pending import PendingPrimitives
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation
from moe_comm.dispatch.peer_to_peer.rows import offset_of
from moe_comm.dispatch.pending import IncomingRows
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import HeapError
from moe_comm.gpu.protocol import Offer, RowFlags, SlotFlags
from moe_comm.runtime.memory import DTYPE_CODES


class OverlappedPrimitives(PendingPrimitives):
    """The primitives of ``peer_to_peer``, and variants that run concurrently with the caller's GEMMs."""

    def start_dispatch_on_side_stream(self, x_TD: Tensor, ids_TK: Tensor, num_blocks: int | None) -> IncomingRows:
        """Run ``start_dispatch`` on a separate stream, on at most ``num_blocks`` thread blocks.

        On a GPU the caller's stream then does not wait for this rank's own rows either: ``row_flags`` has flags for
        them too. Rows in fp8 and relayed rows are complete, as after ``start_dispatch``.
        """
        if self.context.operation.fault is not None or not self._row_format(x_TD, self.context.operation.op).bare:
            return self.start_dispatch(x_TD, ids_TK)
        with self._on_side_stream(num_blocks):
            return self.start_dispatch(x_TD, ids_TK)

    def row_flags(self) -> RowFlags:
        """Return the flags of the rows of the last dispatch or ``spread_on_side_stream``, for kernels that wait."""
        return self.memory.operations.flags("arrived")

    @property
    def device_counts_WE(self) -> Tensor:
        """[W, E] int64 rows of each rank for each expert in the last dispatch, on the device, until the next one."""
        return self.memory.operations.scratch.counts_WE

    def spread_on_side_stream(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor | None,
        weights_TK: Tensor,
        handle: DispatchHandle,
        slots: SlotFlags,
        num_blocks: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``_spread`` on a separate stream, on at most ``num_blocks`` thread blocks. ``row_flags`` has the flags.

        The gradient of the weights is complete after ``wait_for_side_stream``. The caller must call ``end_spread``.
        """
        with self._on_side_stream(num_blocks):
            return self._spread_rows(grad_TD, rows_RD, weights_TK, handle, slots)

    def end_spread(self, operation: Operation) -> None:
        """End ``spread_on_side_stream``. When emulated, wait for all ranks; on a GPU, the kernel ``done`` waits."""
        if self.memory.emulated:
            with KernelOperation(self, operation):
                self.memory.operations.plan.done()
                self.memory.raise_fault()

    def wait_for_side_stream(self) -> None:
        """Make the caller's stream wait for the operations on the separate stream."""
        self._stream.wait()

    def sums_slices(self, op: str, dtype: torch.dtype, weighted: bool) -> bool:
        """Return whether ``sum_while`` supports rows of ``dtype``: they are neither rounded nor reduced by their owner.
        The same on every rank."""
        return not (self.options.wire_dtypes.of(op).narrows(dtype) or (weighted and self.peer_options.fast_combine))

    def sum_while(
        self,
        compute: Callable[[Tensor, RowFlags], None],
        weights_TK: Tensor | None,
        handle: DispatchHandle,
    ) -> tuple[Tensor, Tensor]:
        """Run ``_sum`` while a GEMM computes its rows: each slice of columns is summed once it is computed.

        Args:
            compute: queues the GEMM on the caller's stream. Its arguments are the output [R, D] and the flags of
                (slice, owner). It sets this rank's flags in the memory of the ranks that own the tokens.

        Returns:
            [T, D], the sums, which are complete after ``wait_for_side_stream``, and [R, D], the rows.
        """
        operations, problem = self.memory.operations, None
        rows_RD = torch.empty(0, handle.hidden, dtype=handle.dtype, device=self.device)
        if handle.num_rows and handle.hidden:
            try:
                rows_RD = operations.heap.rows(handle.num_rows, handle.hidden, handle.dtype)
            except HeapError as error:
                problem = error
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        with self._on_side_stream(None), KernelOperation(self, self.context.operation, rows_RD, weights_TK):
            if problem is not None:
                self._raise_no_room(problem)
            y_TD = torch.empty(handle.num_tokens, handle.hidden, dtype=handle.dtype, device=self.device)
            operations.meet(self.packed(self.context.operation), Offer(offset_of(operations.heap, rows_RD)))
            if self.memory.emulated:
                self.memory.check()
            with self._stream.on_callers():
                compute(rows_RD, operations.flags("results"))
            operations.sum_slices(handle.state, weights_TK, y_TD, DTYPE_CODES[handle.dtype], self._blocks)
            if self.memory.emulated:
                self.memory.raise_fault()
            self._check_if_blocking()
            self._stream.use_by_caller(y_TD)
        return y_TD, rows_RD

    @contextmanager
    def _on_side_stream(self, num_blocks: int | None) -> Iterator[None]:
        """Run operations on a separate stream, on at most ``num_blocks`` thread blocks. The caller does not wait."""
        blocks = self._blocks
        self._blocks = min(blocks, num_blocks or blocks)
        self._stream.use_side_stream(True)
        try:
            yield
        finally:
            self._blocks = blocks
            self._stream.use_side_stream(False)
