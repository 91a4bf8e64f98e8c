"""Operations of ``peer_to_peer`` that overlap with the caller's GEMMs: peer by peer, or with a flag for each part.

Peer by peer, for the pipelined executor, the kernel ``arrive`` waits for the rows of one peer. On a GPU it is queued on
the stream, and the CPU does not wait:

    stream   count ▸ scan ▸ meet ▸ push │ own rows │ arrive(1) │ rows of rank 1 │ arrive(2) │ rows of rank 2 ...

So the rows of slow peers are received while those of other peers are computed. Experts start when this rank has sent
its own rows. When emulated, the CPU reads the flags, so it computes rows of peers in the order in which they complete.

With flags, operations run concurrently on a separate stream:

    separate stream    meet ▸ push / spread ───── flags (expert, source, tile) ──▶ a GEMM that waits
    separate stream    meet ▸ ready ▸ sum ▸ ... ▸ done     a GEMM ──────── flags (slice of columns, owner) ──▶ ready

The kernels of the caller are in ``overlap/triton``. Kernels of this module wait with one thread block, so the GEMM of
the caller always has processors to run on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation, PeerToPeerPrimitives
from moe_comm.dispatch.peer_to_peer.rows import offset_of
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingDispatcher
from moe_comm.dispatch.row_operations import RowOperations
from moe_comm.dispatch.types import DeviceCounts, DispatchHandle
from moe_comm.errors import HeapError, MoeCommError
from moe_comm.gpu.protocol import SAME, Ints, Offer, RowFlags
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.memory import DTYPE_CODES


class PeerIncomingRows(IncomingRows):
    """Rows that ``push`` kernels of other ranks write. complete: whether the rows of all peers are complete."""

    def __init__(
        self,
        dispatcher: OverlappedPrimitives,
        rows: Tensor | ScaledRows,
        handle: DispatchHandle,
        complete: bool,
    ) -> None:
        self._dispatcher, self._operation, self._complete = dispatcher, dispatcher.context.operation, complete
        self.handle = handle
        if isinstance(rows, ScaledRows):
            self.scaled = rows
        else:
            self.rows_RD = rows
        self._awaited: set[int] = set()

    def ready(self, peer: int) -> bool:
        memory = self._dispatcher.memory
        return self._complete or peer in self._awaited or (memory.emulated and memory.operations.received(peer))

    def next(self, peers: Sequence[int]) -> int:
        peer = self._dispatcher.wait_for_one_of(self._operation, peers)
        self._awaited.add(peer)
        return peer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._complete:
            return
        self._complete = True
        # After an error, too: the rows of peers must be written before the memory is used again.
        with suppress(*([] if kind is None else [MoeCommError])):
            self._dispatcher.wait_for_rows(self._operation, 0, self._dispatcher.world)


class PeerOutgoingRows(OutgoingRows):
    """Outputs of experts, which peers read after the handshake of ``sum``."""

    def __init__(self, dispatcher: OverlappedPrimitives, rows_RD: Tensor, handle: DispatchHandle) -> None:
        self._dispatcher, self._rows_RD, self._handle = dispatcher, rows_RD, handle
        self._operation = dispatcher.context.operation

    def raise_flag(self, peer: int) -> None:
        pass  # the handshake of ``sum`` reports to all peers that this rank's rows are complete

    def ready(self) -> bool:
        return True

    def sum(self, weights_TK: Tensor | None) -> Tensor:
        with self._dispatcher.running(self._operation):
            return self._dispatcher.sum_rounded(self._rows_RD, weights_TK, self._handle)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass


class OverlappedPrimitives(PeerToPeerPrimitives, PendingDispatcher):
    """The primitives of ``peer_to_peer``, and variants that overlap with the caller's GEMMs."""

    collectives_in_flight = True
    trained_tokens: int | None = None
    """Tokens of each rank on average in the first call with gradients, by which an executor is chosen for all of them,
    so that a recomputed call has the executor of the first one. The same on all ranks; None before."""

    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> IncomingRows:
        # Rows that are encoded or relayed complete together.
        row_format = self._row_format(x_TD, self.context.operation.op)
        wait = self.context.operation.fault is not None or not row_format.bare
        rows: Tensor | ScaledRows
        if self.context.operation.scaled and row_format.packing != SAME:
            rows, handle = self._send_scaled(x_TD, ids_TK)
        else:
            rows, handle = self._send(x_TD, ids_TK, wait=wait)
        return PeerIncomingRows(self, rows, handle, complete=wait)

    def rows_by_source(self, incoming: IncomingRows) -> Ints:
        return self.memory.operations.counts_WE()

    def wait_for_rows(self, operation: Operation, first: int, ranks: int) -> None:
        """Make the current stream wait for the rows of ``ranks`` ranks of the last dispatch. When emulated, block until
        they are received."""
        with KernelOperation(self, operation):
            self.memory.operations.arrive(first, ranks)
            if self.memory.emulated:
                self.memory.raise_fault()

    def wait_for_one_of(self, operation: Operation, peers: Sequence[int]) -> int:
        """Wait for the rows of one of ``peers``, and return this peer: the first, or when emulated the first one with
        complete rows."""
        with KernelOperation(self, operation):
            operations, peer = self.memory.operations, peers[0]
            if self.memory.emulated:
                end = time.monotonic() + self.options.timeout_s
                while not (received := [peer for peer in peers if operations.received(peer)]):
                    if operations.aborted or time.monotonic() > end:
                        operations.begin(0.0)  # the kernel reports the error at once
                        break
                    time.sleep(0)
                peer = received[0] if received else peer
            operations.arrive(peer, 1)
            if self.memory.emulated:
                self.memory.raise_fault()
        return peer

    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle) -> OutgoingRows:
        if self.context.operation.fault is not None:
            self._refuse()
        return PeerOutgoingRows(self, rows_RD, handle)

    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[IncomingRows, Tensor | None]:
        grad_RD, grad_TK = self._spread(grad_TD, rows_RD, weights_TK, handle)
        return PeerIncomingRows(self, grad_RD, handle, complete=True), grad_TK

    def start_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, needs_weights: bool, handle: DispatchHandle
    ) -> tuple[IncomingRows, Tensor]:
        with self.operation("combine backward", handle, needs_weights, extra=1):
            grad_RD, weights_R1 = self._send_gradients(grad_TD, weights_TK.unsqueeze(2), handle)
            return PeerIncomingRows(self, grad_RD, handle, complete=True), weights_R1.squeeze(1)

    def return_gradients(
        self, rows_RD: Tensor | None, dots_R: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        if isinstance(handle.rows_per_expert, DeviceCounts):  # no other executor: one operation
            return RowOperations.return_gradients(self, rows_RD, dots_R, handle)
        return super().return_gradients(rows_RD, dots_R, handle)

    def start_dispatch_on_side_stream(self, x_TD: Tensor, ids_TK: Tensor, num_blocks: int | None) -> IncomingRows:
        """Run ``start_dispatch`` on a separate stream, on at most ``num_blocks`` thread blocks, by expert.

        On a GPU the caller's stream then does not wait for this rank's own rows either: ``row_flags`` has flags for
        the tiles of all ranks. Rows in fp8 and relayed rows are complete, as after ``start_dispatch``. ``send_order``
        is the order for ``spread_on_side_stream``.
        """
        self._list_tiles = True
        try:
            if self.context.operation.fault is not None or not self._row_format(x_TD, self.context.operation.op).bare:
                return self.start_dispatch(x_TD, ids_TK)
            with self._on_side_stream(num_blocks):
                return self.start_dispatch(x_TD, ids_TK)
        finally:
            self._list_tiles = False

    def row_flags(self) -> RowFlags:
        """Return the flags of the rows of the last dispatch or ``spread_on_side_stream``, for kernels that wait."""
        return self.memory.operations.flags("arrived")

    @property
    def device_counts_WE(self) -> Tensor:
        """[W, E] int64 rows of each rank for each expert in the last dispatch, on the device, until the next one."""
        return self.memory.operations.scratch.counts_WE

    def send_weights(self, weights_TK: Tensor, handle: DispatchHandle) -> Tensor:
        """Return [R], the routing weight of each row of this rank. Collective, part of the backward of a combine."""
        return self._send_weights(weights_TK.unsqueeze(2), handle).squeeze(1)

    def spread_on_side_stream(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor | None,
        weights_TK: Tensor,
        handle: DispatchHandle,
        order: Tensor,
        num_blocks: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``_spread`` on a separate stream, on at most ``num_blocks`` thread blocks. ``row_flags`` has the flags.

        The gradient of the weights is complete after ``wait_for_side_stream``. The caller must call ``end_spread``.
        """
        with self._on_side_stream(num_blocks):
            return self._spread_rows(grad_TD, rows_RD, weights_TK.contiguous(), handle, order)[:2]

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
