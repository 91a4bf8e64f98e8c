"""Helpers of the tests of the linear-layer operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.overlap.options import Overlap

TRANSPORTS = (CollectiveOptions(), CollectiveOptions(shared_memory=False, checked=True))
"""Collectives over shared memory, and over the group's backend."""
OVERLAPS = (*(Overlap(chunks, 1) for chunks in (1, 2, 3, 16)), Overlap(2, 1, deterministic=False))

OutputAndGrads = tuple[Tensor, Tensor, Tensor]
"""Output, gradient of x, gradient of the weight."""


def with_every_setting(
    operator: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Callable[[], OutputAndGrads]
) -> list[OutputAndGrads]:
    """Return output and gradients for every transport, chunks and determinism. Checks equality of bits.

    Args:
        inputs: fresh x, weight and gradient of the output, the same every time.
    """
    results: list[OutputAndGrads] = []
    group = dist.group.WORLD
    try:
        for options in TRANSPORTS:
            configure_collectives(options)
            for overlap in OVERLAPS:
                x, w, grad = inputs()
                y = operator(x.requires_grad_(), w.requires_grad_(), group, overlap)
                y.backward(grad)
                assert x.grad is not None
                assert w.grad is not None
                assert torch.equal(y.detach(), reference(x.detach(), w.detach(), group))
                results.append((y.detach(), x.grad, w.grad))
                assert torch.equal(x.grad, results[0][1])
                if overlap.deterministic:
                    assert torch.equal(w.grad, results[0][2])
    finally:
        configure_collectives(CollectiveOptions())
    return results


def assert_near(ranks: Iterable[list[OutputAndGrads]], wholes: Iterable[OutputAndGrads], dtype: torch.dtype) -> None:
    """Compare every rank's results with those of one process in float64."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for results, expected in zip(ranks, wholes, strict=True):
        for result in results:
            for actual, exact in zip(result, expected, strict=True):
                scale = float(exact.abs().max()) if exact.numel() else 0.0
                torch.testing.assert_close(actual.double(), exact, rtol=0, atol=tolerance * max(scale, 1.0))
