"""Interleaved micro-batches: transfers of one micro-batch overlap with the computation of another.

Two micro-batches a and b through layers 0 and 1 (DualPipe, arXiv 2412.19437, section 3.2.1; MegaScale-Infer's ping-pong
pipeline, arXiv 2504.02263). Each yields after its tokens are dispatched, and after its experts:

    computes     a attention 0   b attention 0   a experts 0   b experts 0   a sum, attention 1   b sum, attention 1
    in flight                    a dispatch ══▶  b dispatch ═▶ a combine ══▶ b combine ═════════▶ a dispatch ══════▶

Backward is interleaved as well, b before a: autograd runs operators in reverse order if one backward pass covers all
micro-batches. So gradients are dispatched while another micro-batch's attention is differentiated.

The order depends only on the number of micro-batches and layers, so it is the same on all ranks. If MoE layers do not
overlap, nothing is in flight; the results are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from moe_comm.layers.attention.sequence import Documents

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields where other work can hide its pending transfers, and returns its result."""


@dataclass(frozen=True, eq=False)
class StageInput:
    """Arguments of ``Transformer.forward`` for one micro-batch."""

    x: Tensor
    positions: Tensor | None = None
    documents: Documents | Tensor | None = None


def finish(steps: Steps[T]) -> T:
    """Run ``steps`` to completion."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def take_turns(all_steps: Sequence[Steps[T]]) -> tuple[T, ...]:
    """Run all computations to completion, one step of each in turn, and return their results in order.

    If one raises, the others are closed.
    """
    results: list[Any] = [None] * len(all_steps)
    running = dict(enumerate(all_steps))
    try:
        while running:
            for index, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as end:
                    results[index] = end.value
                    del running[index]
    finally:
        for steps in running.values():
            steps.close()
    return tuple(results)
