"""Interface of an executor: one forward call of an expert layer, from dispatched rows to combined results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import ConfigError
from moe_comm.kernels.expert_mlp import ExpertMLP


class ExpertCall(ABC):
    """One forward call of an expert-parallel layer. Its dispatch has been started.

    Every rank calls ``compute``, then ``combine``, once each:

        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
        y_TD = call.combine(rows)

    Attributes:
        rows: [R, D] rows of this rank's experts. If the executor overlaps computation with the dispatch, ``rows`` is an
            empty tensor that only connects the autograd functions of dispatch and compute.
        handle: the dispatch handle.
        skips_empty_slots: whether ``compute`` accepts parameters without those of the last experts, if these have no
            rows, with the counts of the others.
    """

    rows: Tensor
    skips_empty_slots = False

    @property
    @abstractmethod
    def handle(self) -> DispatchHandle: ...

    def complete(self) -> None:  # noqa: B027 - optional: most executors do not occupy the group after dispatch
        """Complete the dispatch, so that other operations of the group can run before ``compute``."""

    @abstractmethod
    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Run the expert MLPs.

        Args:
            rows: ``self.rows``, or the result of hooks that take it.
            rows_per_expert: number of rows of each local expert.
            mlp: parameters of the experts, in the dtype of ``rows``.

        Returns:
            The argument of ``combine``: [R, D] outputs of the experts, or an empty tensor if ``self.rows`` is empty.

        Raises:
            InputError: the parameters do not match the rows; raised on this rank only.
            PeerDied, PeerTimeout: a rank failed, or its rows were not received in time.
        """

    @abstractmethod
    def combine(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of the expert outputs of each token, [T, D].

        Raises:
            PeerDied, PeerTimeout: a rank failed, or its results were not received in time.
        """

    @abstractmethod
    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception between dispatch and combine to the other ranks."""


def fp8_fault() -> ConfigError:
    """Return the error of the device executor for experts with fp8 GEMMs."""
    return ConfigError(
        "the kernels of the device executor multiply rows in their own dtype, not in fp8; use executor 'serial', "
        "'pipelined' or 'auto'"
    )


def check_device_experts(mlp: ExpertMLP) -> None:
    """Raise ConfigError if the device executor cannot run these experts."""
    if any(bias is not None for bias in mlp.tensors[2:]):
        raise ConfigError("the device executor runs experts without biases; use Overlap(executor='pipelined')")
    if mlp.gemm_dtype == "fp8":
        raise fp8_fault()
