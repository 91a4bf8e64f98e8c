"""Parts shared by ``gather_matmul`` and ``matmul_scatter``: choice of transport, Triton kernels, and one-rank GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.kernels.autograd import needed_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import GatheredRows, OperatorPlan, exact_mm
from moe_comm.overlap.options import TRITON
from moe_comm.overlap.shared import SharedTransfers, reads_in_place, run_in_place
from moe_comm.overlap.tuning.cost import OperatorWork

if TYPE_CHECKING:
    from moe_comm.overlap.triton.linear import LinearKernels

T = TypeVar("T")


class LinearTransport(Protocol):
    """Transfers rows between the ranks for one pass of an operator: an ``OperatorPlan`` or a ``SharedTransport``."""

    def start_gather(self, x_SD: Tensor) -> Iterator[GatheredRows]:
        """Gather all ranks' rows. Each item is valid until the next one is requested."""

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        """Start the reduce-scatter of x @ b. The returned call waits for this rank's rows, [S, N]."""


def run_on_transport(plan: OperatorPlan, transfers: SharedTransfers, body: Callable[[LinearTransport], T]) -> T:
    """Return ``body(transport)``, with shared memory as the transport where it can be used, else chunked collectives.

    Args:
        body: Starts the operations that ``transfers`` describes. It runs again if a rank's shared memory is full.
    """
    communicates = transfers.gathered_SD is not None or transfers.sum_columns is not None
    if communicates and reads_in_place(plan, transfers.like):
        result = run_in_place(plan, transfers, body)
        if result is not None:
            return result
    return body(plan)


operator_work = lru_cache(maxsize=1024)(OperatorWork)
"""Cached: constructing and hashing an OperatorWork takes as long as a GEMM of few rows."""


def fused_kernels(plan: OperatorPlan, group: ProcessGroup, like: Tensor) -> LinearKernels | None:
    """Return the Triton kernels if the plan uses them.

    Raises:
        MissingDependency: Triton is not installed.
        InputError: the kernels do not support the dtype.
        ConfigError: CPU tensors outside Triton's interpreter.
    """
    if plan.choice.backend != TRITON:
        return None
    from moe_comm.overlap.triton.linear import LinearKernels  # needs Triton

    return LinearKernels.of(group, like, plan.choice.programs or None)


def local_linear(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """Return x @ w.T, [R, N]: both operators on one rank."""
    return row_invariant_mm(x_RK, w_NK.t())


def local_linear_gradients(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and w, which ``ctx`` saved; None for a gradient that is not needed."""
    x_RK, w_NK = ctx.saved_tensors
    needs_x, needs_w = needed_gradients(ctx)[:2]
    return row_invariant_mm(grad_RN, w_NK) if needs_x else None, exact_mm(grad_RN.t(), x_RK) if needs_w else None
