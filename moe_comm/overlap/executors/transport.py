"""How rows of one dispatch reach the experts range by range, and how results return: what a transport implements.

The rows of a dispatch come in *parts*, each of which completes by itself: chunks of a collective, or the rows of one
peer. The executor asks for completed parts, computes their rows, and marks each part as computed, so that its results
can return while other parts are still in transfer:

    RowSend      part 0 ═▶ part 1 ═▶ part 2 ═▶          dispatch, and the backward pass of combine
    executor          [own rows][part 0][part 1][part 2]
    RowReturn                       ◀═ 0   ◀═ 1   ◀═ 2   combine, and the backward pass of dispatch

Every rank calls the same operations in the same order. A transport moves the rows and takes the sums that the
dispatcher would, so the bits are those of one step after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import MoeCommError
from moe_comm.overlap.chunk_plan import Parts, Piece


class RowSend(ABC):
    """Rows on their way to this rank's experts.

    Attributes:
        rows_RD: [R, D], filled as parts complete. This rank's own rows are complete once it is open.
    """

    rows_RD: Tensor

    def open(self, results_RD: Tensor | None) -> None:  # noqa: B027 - most have nothing to open
        """Begin, if it has not begun. Called before anything else.

        Args:
            results_RD: in combine's backward, the experts' outputs, for the gradient of the routing weights; None: it
                is not wanted.
        """

    @abstractmethod
    def take(self, wait: bool) -> Sequence[int]:
        """The parts that have completed since the last call; each part is returned once.

        Args:
            wait: block until something has happened; the result may be empty nevertheless.

        Raises:
            PeerDied, PeerTimeout: a rank failed, or its rows did not come in time.
        """

    def prepare(self, piece: Piece) -> None:  # noqa: B027 - only gradients need it
        """Called for each row range of completed rows, once, before it is computed."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Called once all parts have been taken and all rows computed, or to complete all parts at once."""

    def abandon(self, error: BaseException) -> None:  # noqa: B027 - most have peers that notice it elsewhere
        """Called instead of ``close`` after an exception."""


class RowReturn(ABC):
    """Results of this rank's experts on their way back.

    Attributes:
        rows_RD: [R, D], where the caller writes the results.
    """

    rows_RD: Tensor

    @abstractmethod
    def computed(self, part: int) -> None:
        """All rows of ``part`` are in ``rows_RD``. Each part once."""

    def close(self, weights_TK: Tensor | None, spare: Callable[[], bool]) -> None:  # noqa: B027
        """All rows are in ``rows_RD``. A transport that cannot leave the operation open takes its sum here.

        Args:
            weights_TK: as ``result`` takes it.
            spare: does a part of other work while peers are waited for; False: there is none left.
        """

    @abstractmethod
    def result(self, weights_TK: Tensor | None) -> Tensor:
        """[T, D] the sum of each token's results, times its routing weights if given. After ``close``, once.

        Raises:
            PeerDied, PeerTimeout: a rank failed, or its results did not come in time.
        """

    def abandon(self, error: BaseException) -> None:  # noqa: B027
        """Called instead of ``close`` after an exception."""


@dataclass(frozen=True, eq=False)
class RowDispatch(ABC):
    """One dispatch that ranks have agreed on, and how its rows move; what ``matmul_combine`` needs to return them.

    handle: as ``Dispatcher.dispatch`` gives it, with the rows in the same places.
    chunks: number of groups of parts, which are computed together.
    """

    dispatcher: Dispatcher
    handle: DispatchHandle
    chunks: int

    in_flight: ClassVar[bool]
    """Whether transfers stay open between the passes, while other work runs."""

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which results are multiplied by routing weights."""
        return torch.promote_types(self.handle.dtype, torch.float32)

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Which row ranges each part has, and which are this rank's own."""

    @abstractmethod
    def send_gradients(self, grad_TD: Tensor, weights_TK: Tensor, weights_grad: bool) -> SentGradients:
        """Begin to send the tokens' gradients, which are multiplied by their routing weights on the way.

        Args:
            weights_grad: whether any rank wants the gradient of the routing weights; the same on every rank.
        """

    @abstractmethod
    def send_back(self, op: str, grads: tuple[bool, bool], after: RowSend | None) -> RowReturn:
        """Begin the way back of results.

        Args:
            op: "combine" or "dispatch backward".
            grads: whether anything needs a gradient, and whether routing weights do; compared between ranks.
            after: the way to the experts that the results follow, part by part; None: all rows are there already.
        """

    @abstractmethod
    def each_way(self, operator: str, width: int) -> tuple[Self, Self]:
        """This dispatch in the chunks of ``operator`` beside a product of ``width`` columns, forward and backward."""

    @abstractmethod
    def refuse(self, op: str, fault: MoeCommError) -> NoReturn:
        """Raise ``fault`` in place of ``op``, on every rank if operations are checked."""

    @abstractmethod
    def abort_on_error(self, send: RowSend | None) -> AbstractContextManager[None]:
        """Report an exception in the ``with`` block to the other ranks, which would wait for this one.

        Args:
            send: the way to the experts, if it is open.
        """


class SentGradients(RowSend):
    """Gradients of tokens on their way to the experts."""

    @abstractmethod
    def start_weights(self) -> Callable[[], Tensor | None]:
        """Begin to return the gradient of the routing weights, after all rows; the call waits for it, [T, K].

        None if ``open`` was given no results.
        """
