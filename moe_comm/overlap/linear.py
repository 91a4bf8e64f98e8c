"""What ``gather_matmul`` and ``matmul_scatter`` share: how their rows travel, and what they are on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import Arrival, Lines, exact_mm, scattered_mm
from moe_comm.overlap.cost import Work
from moe_comm.overlap.options import TRITON
from moe_comm.overlap.shared import Traffic, in_place, reads_in_place

if TYPE_CHECKING:
    from moe_comm.overlap.triton.linear import Kernels

T = TypeVar("T")


class Way(Protocol):
    """How one pass moves rows between the ranks. What it begins has to be taken before the pass ends."""

    def start_gather(self, x_SD: Tensor) -> Iterator[Arrival]:
        """Every rank's rows as they arrive; one arrival's are valid until the next is asked for."""

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        """Begin the sum over ranks of x @ b; the call returned gives this rank's rows of it, [S, N]."""


@dataclass(frozen=True)
class Chunked:
    """By chunks, over whatever the group's channel has."""

    lines: Lines

    def start_gather(self, x_SD: Tensor) -> Iterator[Arrival]:
        return self.lines.start_gather(x_SD)

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        return scattered_mm(self.lines, x_WSK, b_KN)


def carried(lines: Lines, traffic: Traffic, body: Callable[[Way], T]) -> T:
    """What ``body`` computes, its rows moved in place between ranks that share memory, and by chunks otherwise.

    Args:
        body: begins what ``traffic`` says. It runs again if a rank's shared memory turns out to be full.
    """
    moves = traffic.gathered_SD is not None or traffic.sum_columns is not None
    if moves and reads_in_place(lines, traffic.like):
        done = in_place(lines, traffic, body)
        if done is not None:
            return done
    return body(Chunked(lines))


work_of = lru_cache(maxsize=1024)(Work)
"""The same object for the same sizes: making it, and hashing it anew, would take as long as a product of few rows."""


def differentiated(*tensors: Tensor) -> bool:
    """Whether autograd will ask for gradients of any of these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def fused(lines: Lines, group: ProcessGroup, like: Tensor) -> Kernels | None:
    """The Triton kernels, if they are chosen for this pass.

    Raises:
        MissingDependency: Triton is not installed. InputError: they do not take this dtype.
        ConfigError: CPU tensors outside Triton's interpreter.
    """
    if lines.choice.backend != TRITON:
        return None
    from moe_comm.overlap.triton.linear import Kernels  # needs Triton

    return Kernels.of(group, like, lines.choice.programs or None)


def product(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """[R, N] = x @ w.T: both operators on one rank."""
    return row_invariant_mm(x_RK, w_NK.t())


def product_gradients(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Those of ``product``, of x and w as saved in ``ctx``; None where nobody wants one."""
    x_RK, w_NK = ctx.saved_tensors
    needs_x, needs_w = wanted_gradients(ctx)[:2]
    return row_invariant_mm(grad_RN, w_NK) if needs_x else None, exact_mm(grad_RN.t(), x_RK) if needs_w else None
