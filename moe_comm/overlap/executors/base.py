"""What an executor gives a layer: one call of its experts, from the dispatch of the rows to the combined results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from moe_comm.dispatch.types import DispatchHandle
from moe_comm.kernels.expert_mlp import ExpertMLP


class ExpertCall(ABC):
    """One call of an expert-parallel layer, whose rows have been dispatched. Every rank calls ``compute``, then
    ``combine``, once each:

        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
        y_TD = call.combine(rows)

    Attributes:
        rows: [R, D] the rows of this rank's experts; or an empty tensor that stands for them in autograd's graph, where
            the executor computes rows that are still in transfer.
        handle: the dispatch handle.
    """

    rows: Tensor

    @property
    @abstractmethod
    def handle(self) -> DispatchHandle: ...

    def complete(self) -> None:  # noqa: B027 - most leave the group free
        """Make the group free for other operations before ``compute``: other layers, or other calls of this one."""

    @abstractmethod
    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Run the experts.

        Args:
            rows, rows_per_expert: those of this call; ``rows`` may have passed through hooks.
            mlp: the experts' parameters in the dtype of ``rows``.

        Returns:
            [R, D] their outputs, or what stands for them; for ``combine``.

        Raises:
            InputError: the parameters do not fit the rows; on this rank only.
            PeerDied, PeerTimeout: a rank failed, or its rows did not come in time.
        """

    @abstractmethod
    def combine(self, rows: Tensor) -> Tensor:
        """[T, D] the weighted sum of each token's experts.

        Raises:
            PeerDied, PeerTimeout: a rank failed, or its results did not come in time.
        """

    @abstractmethod
    def abort_on_error(self) -> AbstractContextManager[None]:
        """Report an exception in the ``with`` block, between dispatch and combine, to the other ranks."""
