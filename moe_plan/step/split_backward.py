"""The halves of a split backward pass: input gradients at once, weight gradients when a rank is idle.

The split is that of torch (``stage_backward_input`` and ``stage_backward_weight`` of ``torch.distributed.pipelining``)
for the layers of the bundled trainer:

    input     the backward pass without the weight gradients of matrix products (``Operation.weight_grad_s``)
    weight    these weight gradients, and what they need that the input half did not save. Work that recompute
              "selective" repeats is repeated in both halves. Experts that are one autograd function (not fused with
              their transfers) compute the gradient of their first product's output a second time.
    neither   the first stage, which has no input gradient: its complete backward is the weight half. The head, whose
              gradients are computed with the loss. Layers with recompute "full", whose weight gradients are computed
              with the input gradients. None of these backward passes is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_plan.step.operators import Operation

_REPEATED = ("experts down", "experts act")
"""Operators of unfused experts that both halves run, except for weight gradients."""


def halves(
    backward: Sequence[Operation], recomputed: int, fused: bool
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return the input half and the weight half of a layer's backward.

    Args:
        backward: operations without hidden time.
        recomputed: number of leading operations that recompute forward operations.
        fused: experts are fused with their transfers, and save the inputs of their weight gradients.
    """
    first = tuple(
        _half(operation, operation.seconds - operation.weight_grad_s) if operation.weight_grad_s else operation
        for operation in backward
    )
    second = list(backward[:recomputed])
    for operation, input_half in zip(backward[recomputed:], first[recomputed:], strict=True):
        if recomputed and operation.kind == "transfer" and operation.name.endswith(" again"):
            second.append(operation)  # the gather of recomputed inputs
        if operation.name in _REPEATED and not fused:
            second.append(input_half)
        if operation.weight_grad_s:
            second.append(_half(operation, operation.weight_grad_s))
    return first, tuple(second)


def _half(operation: Operation, seconds: float) -> Operation:
    return replace(operation, seconds=seconds, flops=operation.flops / 2, bytes=operation.bytes / 2, weight_grad_s=0.0)
