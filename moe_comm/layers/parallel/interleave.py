"""Several micro-batches that take turns: what one sends and waits for travels while another computes.

Two micro-batches a and b through layers 0 and 1 (DualPipe, arXiv 2412.19437, section 3.2.1; MegaScale-Infer's
ping-pong, arXiv 2504.02263). Each gives way after its tokens have left, and after its experts' results have:

    computes     a attention 0   b attention 0   a experts 0   b experts 0   a sum, attention 1   b sum, attention 1
    under way                    a dispatch ══▶  b dispatch ═▶ a combine ══▶ b combine ═════════▶ a dispatch ══════▶

Backward takes turns by itself, b before a: autograd runs operators in the opposite order of their forward passes, as
long as one backward pass covers all micro-batches. So gradients leave for the experts while another micro-batch's
attention is differentiated.

The order depends on the number of micro-batches and layers alone, so it is the same on every rank. Nothing is under
way, and the numbers are the same, where MoE layers do not overlap.
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
"""Work that yields where other work can hide what it has under way, and returns its result."""


@dataclass(frozen=True, eq=False)
class StageInput:
    """What ``Transformer.forward`` takes of one micro-batch."""

    x: Tensor
    positions: Tensor | None = None
    documents: Documents | Tensor | None = None


def finish(steps: Steps[T]) -> T:
    """Run ``steps`` to the end without giving way."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def take_turns(all_steps: Sequence[Steps[T]]) -> tuple[T, ...]:
    """Run all to their ends, one step of each in turn; their results in the same order.

    Where one raises, the others are closed.
    """
    results: list[Any] = [None] * len(all_steps)
    running = dict(enumerate(all_steps))
    try:
        while running:
            for place, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as end:
                    results[place] = end.value
                    del running[place]
    finally:
        for steps in running.values():
            steps.close()
    return tuple(results)
