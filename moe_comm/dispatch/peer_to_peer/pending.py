"""Operations of ``peer_to_peer`` that the pipelined executor runs peer by peer.

The kernel ``arrive`` waits for the rows of one peer. On a GPU it is queued on the stream, and the host does not wait:

    stream   count ▸ scan ▸ meet ▸ push │ own rows │ arrive(1) │ rows of rank 1 │ arrive(2) │ rows of rank 2 ...

So the rows of slow peers are received while those of other peers are computed. Experts start when this rank has sent
its own rows. In emulation the host reads the flags, so it computes rows of peers in the order in which they complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from moe_comm.comm.header import Header
from moe_comm.dispatch.pending import IncomingRows, OutgoingRows
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError
from moe_comm.kernels.fp8 import ScaledRows

if TYPE_CHECKING:
    from moe_comm.dispatch.peer_to_peer.primitives import PeerToPeerPrimitives


class PeerIncomingRows(IncomingRows):
    """Rows that ``push`` kernels of other ranks write. complete: whether the rows of all peers are complete."""

    def __init__(
        self,
        dispatcher: PeerToPeerPrimitives,
        rows: Tensor | ScaledRows,
        handle: DispatchHandle,
        header: Header,
        complete: bool,
    ) -> None:
        self._dispatcher, self._header, self._complete = dispatcher, header, complete
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
        peer = self._dispatcher.wait_for_one_of(self._header, peers)
        self._awaited.add(peer)
        return peer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._complete:
            return
        self._complete = True
        # After an error, too: the rows of peers must be written before the memory is used again.
        with suppress(*([] if kind is None else [MoeCommError])):
            self._dispatcher.wait_for_rows(self._header, 0, self._dispatcher.world)


class PeerOutgoingRows(OutgoingRows):
    """Outputs of experts, which peers read after the meeting of ``sum``."""

    def __init__(
        self, dispatcher: PeerToPeerPrimitives, rows_RD: Tensor, handle: DispatchHandle, header: Header
    ) -> None:
        self._dispatcher, self._rows_RD, self._handle, self._header = dispatcher, rows_RD, handle, header

    def raise_flag(self, peer: int) -> None:
        pass  # the meeting of ``sum`` tells all peers that this rank's rows are complete

    def ready(self) -> bool:
        return True

    def sum(self, weights_TK: Tensor | None) -> Tensor:
        return self._dispatcher.sum_rounded(self._rows_RD, weights_TK, self._handle, self._header)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass
