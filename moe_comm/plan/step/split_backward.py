"""What the halves of a split backward pass run: gradients of the input at once, those of weights when a rank is free.

As torch splits a backward (``torch.distributed.pipelining``, ``stage_backward_input`` and ``stage_backward_weight``)
of the bundled trainer's layers:

    input     all of a backward but products' gradients of weights (``Operation.later``)
    weight    those; and what they need that the other half did not keep: what recomputing "selective" computes again
              is computed again in both halves, and experts that are one function (not fused with their transfers) need
              the gradient that goes into their first product a second time
    neither   of the first stage, which has no input to give a gradient to: its whole backward is the weight half; of
              the head, whose gradients are there with the loss; and of layers that are recomputed in full, whose
              weights' gradients come with the input's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_comm.plan.step.operators import Operation

_TWICE = ("experts down", "experts act")
"""Of experts that are one function: what its two halves both run, as far as it is no weight's gradient."""


def halves(
    backward: Sequence[Operation], again: int, fused: bool
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """(for the input, for the weights) of a layer's backward.

    Args:
        backward: without what is hidden of it. again: how many of the first operations are forward's done again.
        fused: experts are fused with their transfers, and keep what their weights' gradients are made of.
    """
    first = tuple(_without_later(one) for one in backward)
    second = list(backward[:again])
    for one, early in zip(backward[again:], first[again:], strict=True):
        if again and one.kind == "transfer" and one.name.endswith(" again"):
            second.append(one)  # the gather of what is computed again
        if one.name in _TWICE and not fused:
            second.append(early)
        if one.later:
            second.append(replace(one, seconds=one.later, flops=one.flops / 2, bytes=one.bytes / 2, later=0.0))
    return first, tuple(second)


def _without_later(one: Operation) -> Operation:
    if not one.later:
        return one
    return replace(one, seconds=one.seconds - one.later, flops=one.flops / 2, bytes=one.bytes / 2, later=0.0)
