"""Operations of ``peer_to_peer`` that the pipelined executor runs peer by peer.

The kernel ``arrive`` waits for the rows of one peer. On a GPU it is queued on the stream, and the CPU does not wait:

    stream   count ▸ scan ▸ meet ▸ push │ own rows │ arrive(1) │ rows of rank 1 │ arrive(2) │ rows of rank 2 ...

So the rows of slow peers are received while those of other peers are computed. Experts start when this rank has sent
its own rows. When emulated, the CPU reads the flags, so it computes rows of peers in the order in which they complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation, PeerToPeerPrimitives
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows, PendingDispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError
from moe_comm.gpu.protocol import SAME, Ints
from moe_comm.kernels.fp8 import ScaledRows


class PeerIncomingRows(IncomingRows):
    """Rows that ``push`` kernels of other ranks write. complete: whether the rows of all peers are complete."""

    def __init__(
        self,
        dispatcher: PendingPrimitives,
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

    def __init__(self, dispatcher: PendingPrimitives, rows_RD: Tensor, handle: DispatchHandle) -> None:
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


class PendingPrimitives(PeerToPeerPrimitives, PendingDispatcher):
    """The primitives of ``peer_to_peer``, and variants that complete peer by peer."""

    collectives_in_flight = True

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
