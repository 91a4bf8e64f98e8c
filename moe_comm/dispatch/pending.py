"""Operations whose rows are received peer by peer, for the pipelined executor.

All of them raise ``PeerDied``, ``PeerTimeout`` or ``PeerError`` if a rank is lost or failed, and ``RankMismatch``,
``InputError`` and ``RoutingError`` on every rank when they start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.kernels.fp8 import ScaledRows


class PendingTransfer(ABC):
    """A transfer in flight, for use in a ``with`` block by one thread.

    Leaving the block completes the transfer. An exception aborts it, and the other ranks raise ``PeerError``.
    """

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


class IncomingRows(PendingTransfer):
    """Rows in transfer to this rank's experts.

    Attributes:
        rows_RD: The destination. This rank's own rows are complete. Rows of a peer are complete after ``next`` returns
            it, or once ``ready(peer)`` is True; on a GPU, for operations that are then queued on the current stream.
        scaled: The encoded rows in place of ``rows_RD``, if the operation has ``scaled`` and rows are encoded in fp8 in
            transfer. Else None, and ``rows_RD`` are not rounded to an fp8 wire dtype.
        handle: The dispatch handle.
    """

    rows_RD: Tensor
    scaled: ScaledRows | None = None
    handle: DispatchHandle

    @abstractmethod
    def ready(self, peer: int) -> bool:
        """Return whether all rows of ``peer`` are complete."""

    @abstractmethod
    def next(self, peers: Sequence[int]) -> int:
        """Wait until the rows of one of ``peers`` are complete, and return the first such peer."""


class OutgoingRows(PendingTransfer):
    """Outputs of this rank's experts, which peers read in place when they are complete."""

    @abstractmethod
    def raise_flag(self, peer: int) -> None:
        """Mark the rows that ``peer`` dispatched as complete."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether ``sum`` would return without waiting."""

    @abstractmethod
    def sum(self, weights_TK: Tensor | None) -> Tensor:
        """Wait for all rows of this rank's tokens and return their sum, [T, D]. Call it after flags for all peers."""


class PendingDispatcher(Dispatcher):
    """A dispatcher whose ranks access each other's memory, so that the rows of each peer can complete separately.

    The ``start_*`` methods run without autograd. They return an object that the caller must use as a context manager
    before the group's next operation. Rows of peers may be in flight when they return.
    """

    collectives_in_flight: ClassVar[bool]
    """Whether collectives of the group can run while rows are in flight."""

    @abstractmethod
    def start_dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> IncomingRows:
        """Start the current operation, a dispatch."""

    @abstractmethod
    def rows_by_source(self, incoming: IncomingRows) -> npt.NDArray[np.int64]:
        """Return [W, E], the rows of each rank for each expert, of the dispatch that has just been started."""

    @abstractmethod
    def start_sum(self, rows_RD: Tensor, handle: DispatchHandle) -> OutgoingRows:
        """Start a combine, or the backward of a dispatch, of rows that the caller then computes."""

    @abstractmethod
    def start_spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[IncomingRows, Tensor | None]:
        """Start the backward of a combine. The gradient of the weights, [T, K], is complete on return."""

    # Weights and their gradients are sent in operations of their own, so that serial and pipelined ranks can run
    # together.

    def start_gradients(
        self, grad_TD: Tensor, weights_TK: Tensor, needs_weights: bool, handle: DispatchHandle
    ) -> tuple[IncomingRows, Tensor]:
        """Start ``send_gradients``. The weights [R] are complete on return."""
        with self.operation("combine backward", handle, needs_weights, extra=1):
            weights_R1 = self._send_weights(weights_TK.unsqueeze(2), handle)
            incoming, _ = self.start_spread(grad_TD, None, torch.ones_like(weights_TK), handle)
        return incoming, weights_R1.squeeze(1)

    def return_gradients(
        self, rows_RD: Tensor | None, dots_R: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor | None, Tensor]:
        if handle.in_place or rows_RD is None:
            return super().return_gradients(rows_RD, dots_R, handle)
        y_TD = self.dispatch_backward(rows_RD, handle)
        return y_TD, super().return_gradients(None, dots_R, handle)[1]

    def _send_gradients(self, grad_TD: Tensor, words_TKX: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        words_RX = self._send_weights(words_TKX, handle)
        ones_TK = torch.ones(words_TKX.shape[:2], dtype=words_TKX.dtype, device=words_TKX.device)
        return self._spread(grad_TD, None, ones_TK, handle)[0], words_RX
