"""Interface of a transport: rows of one dispatch are received range by range, and results return range by range.

The rows of a dispatch consist of *segments*. A segment completes at once: one chunk of a collective, or the rows of one
peer. The executor polls for completed segments, computes their rows, and marks each segment as computed, so that its
results are sent while other segments are still in flight:

    RowSend      segment 0 ═▶ segment 1 ═▶ segment 2 ═▶          dispatch, and the backward pass of combine
    executor             [own rows][segment 0][segment 1][segment 2]
    RowReturn                             ◀═ 0   ◀═ 1   ◀═ 2     combine, and the backward pass of dispatch

Every rank calls the same operations in the same order. A transport moves the same rows and takes the same sums as the
dispatcher, so the bits are those of the serial executor. Waits raise PeerDied or PeerTimeout if
a rank failed or did not call in time. The handshake raises InputError, RoutingError and RankMismatch on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.pending import PendingDispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.overlap.chunk_plan import RowRange, RowSegments


class RowSend(ABC):
    """Sends rows to the experts; receives the rows of this rank's experts.

    Attributes:
        rows_RD: [R, D], filled as segments complete. This rank's own rows are complete after ``start``.
        scaled: the encoded rows in place of ``rows_RD``, for experts with fp8 GEMMs. None: rows are received in their
            own dtype, or are gradients.
    """

    rows_RD: Tensor
    scaled: ScaledRows | None = None

    def start(self, results_RD: Tensor | None) -> None:  # noqa: B027 - most transports start in the constructor
        """Start the transfer. Called before all other methods.

        Args:
            results_RD: In combine's backward, the experts' outputs, for the gradient of the routing weights. None if
                that gradient is not needed.
        """

    @abstractmethod
    def poll(self, wait: bool) -> Sequence[int]:
        """Return the segments that have completed since the last call. Each segment is returned once.

        Args:
            wait: Block until there is progress. The result may still be empty.
        """

    def prepare(self, row_range: RowRange) -> None:  # noqa: B027 - only gradients need it
        """Prepare completed rows. Called once for each row range, before it is computed."""

    def close(self) -> None:  # noqa: B027 - optional
        """Finish the transfer. Called after all rows have been computed, or to wait for all segments at once."""

    def abort(self, error: BaseException) -> None:  # noqa: B027 - optional
        """Release the transfer after an exception. Called instead of ``close``."""


class RowReturn(ABC):
    """Returns the results of this rank's experts to the tokens.

    Attributes:
        rows_RD: [R, D], which the caller fills with the results.
    """

    rows_RD: Tensor

    @abstractmethod
    def mark_computed(self, segment: int) -> None:
        """Start to return a segment, whose rows are all in ``rows_RD``. Called once for each segment."""

    def close(self, weights_TK: Tensor | None, other_work: Callable[[], bool]) -> None:  # noqa: B027 - optional
        """Finish after all rows have been computed. A transport that occupies its group takes its sum here.

        Args:
            weights_TK: As for ``result``.
            other_work: Does one unit of other work while peers are waited for; returns False if none is left.
        """

    @abstractmethod
    def result(self, weights_TK: Tensor | None) -> Tensor:
        """Return [T, D], the sum of each token's results, times ``weights_TK`` if given; once, after ``close``."""

    def abort(self, error: BaseException) -> None:  # noqa: B027
        """Release the transfer after an exception. Called instead of ``close``."""


@dataclass(frozen=True, eq=False)
class RowDispatch(ABC):
    """One dispatch after the handshake (the exchange of row counts and checks), and how its rows move.

    ``matmul_combine`` needs it to return the results.
    handle: the dispatch handle of ``Dispatcher.dispatch``, with the same row order.
    chunks: number of groups of segments that are computed together.
    """

    dispatcher: Dispatcher
    handle: DispatchHandle
    chunks: int

    in_flight: ClassVar[bool]
    """Whether rows stay in flight between dispatch and experts, while other operations of the group run."""

    @property
    def experts_function(self) -> type[torch.autograd.Function] | None:
        """The function that runs the experts where kernels wait for rows on the device; None: that of the pipelined
        executor."""
        return None

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which results are multiplied by routing weights."""
        return torch.promote_types(self.handle.dtype, torch.float32)

    @property
    @abstractmethod
    def segments(self) -> RowSegments:
        """The row ranges of each segment, and those of this rank's own rows."""

    @abstractmethod
    def send_gradients(self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool, unscaled: bool) -> SentGradients:
        """Start to send the tokens' gradients and routing weights.

        Args:
            weights_grad: Whether the gradient of the routing weights is needed; the same on every rank.
            unscaled: The experts multiply by the weights.
        """

    @abstractmethod
    def start_return(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> RowReturn:
        """Return the transfer of the results to the tokens.

        Args:
            op: "combine" or "dispatch backward".
            grads: Whether any input needs a gradient, and whether the routing weights do; compared between ranks.
            after: The ``RowSend`` whose segments the results follow; None if all rows are complete.
        """

    @abstractmethod
    def per_direction(self, operator: str, width: int) -> tuple[Self, Self]:
        """Return this dispatch with the chunks for ``operator`` and a GEMM of ``width`` columns, forward and
        backward."""

    @abstractmethod
    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` instead of running ``op``; on every rank if operations are checked."""

    @abstractmethod
    def abort(self, error: Exception, send: RowSend | None = None) -> None:
        """Report ``error`` to the other ranks, which would wait for this one. send: in flight, or None."""


class SentGradients(RowSend):
    """Sends the gradients of tokens to the experts.

    Attributes:
        weights_R: [R] routing weights (wide) if the experts multiply by them (``MLPBackward``), complete for a row
            range after ``prepare``. None: ``rows_RD`` are multiplied by them.
    """

    weights_R: Tensor | None = None

    @abstractmethod
    def start_weight_gradient(self, dots_R: Tensor | None) -> Callable[[], Tensor | None]:
        """Start to return the routing weights' gradient, after all rows. The returned call waits for it, [T, K].

        Args:
            dots_R: The gradient of ``weights_R``, if the experts compute it. If not, it is that of the results given to
                ``start``; the call returns None without any.
        """


def pipelined_fault(dispatcher: Dispatcher) -> ConfigError | None:
    """Return the error if there is no transport for the rows of ``dispatcher``, else None; the same on every rank."""
    known = type(dispatcher) is AllToAllDispatcher or isinstance(dispatcher, PendingDispatcher)
    if known and dispatcher.options.wire_dtypes.invariant:
        return None
    return ConfigError(
        "the pipelined executor needs the dispatcher all_to_all, shared_memory or peer_to_peer, and wire dtypes with "
        f"scales for each row; got {dispatcher.name} with {dispatcher.options.wire_dtypes}. Use executor='auto' to run "
        "serially instead"
    )
