"""Interface of an executor: one call of the experts, from the dispatch of the rows to the combined results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from moe_comm.dispatch.types import DispatchHandle
from moe_comm.kernels.expert_mlp import ExpertMLP


class ExpertCall(ABC):
    """One call of an expert-parallel layer whose rows have been dispatched.

    Every rank calls ``compute``, then ``combine``, once each:

        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
        y_TD = call.combine(rows)

    Attributes:
        rows: [R, D] the rows of this rank's experts. If the executor computes rows that are still in flight, ``rows``
            is an empty tensor instead, which connects the autograd functions.
        handle: the dispatch handle.
    """

    rows: Tensor

    @property
    @abstractmethod
    def handle(self) -> DispatchHandle: ...

    def complete(self) -> None:  # noqa: B027 - most leave the group free
        """Complete the dispatch, so that other operations of the group can run before ``compute``."""

    @abstractmethod
    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Run the experts.

        Args:
            rows: ``self.rows``, which may have been passed through hooks.
            rows_per_expert: Rows of each local expert.
            mlp: The experts' parameters in the dtype of ``rows``.

        Returns:
            [R, D] their outputs, or an empty tensor as for ``rows``; the argument of ``combine``.

        Raises:
            InputError: the parameters do not match the rows; raised on this rank only.
            PeerDied, PeerTimeout: a rank failed, or its rows were not received in time.
        """

    @abstractmethod
    def combine(self, rows: Tensor) -> Tensor:
        """Return [T, D], the weighted sum of each token's experts.

        Raises:
            PeerDied, PeerTimeout: a rank failed, or its results were not received in time.
        """

    @abstractmethod
    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context that reports an exception between dispatch and combine to the other ranks."""
