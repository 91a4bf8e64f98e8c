"""The matrix multiplication rate of this machine, the reference of model FLOPs utilisation."""

from __future__ import annotations

import statistics
import time

import torch

BUDGET_S = 0.3
"""Approximate duration of a measurement. Where bf16 is emulated, one large product takes seconds."""


def gemm_flops(dtype: torch.dtype = torch.float32, device: str = "cpu", size: int | None = None) -> float:
    """Return the median FLOP/s of ``torch.mm`` of square matrices with the threads of this process.

    Ranks that share a machine must call it at the same time. Otherwise each measures the rate of the whole machine.

    Args:
        size: size of the matrices. None: large enough for the best rate, but smaller on slow machines.
    """
    cuda = device.startswith("cuda")
    if size is None:
        size = 8192 if cuda else 768
        if not cuda and 2.0 * size**3 / gemm_flops(dtype, device, 128) > BUDGET_S:
            size = 256
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    out = torch.empty(size, size, dtype=dtype, device=device)

    def once() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    began = time.perf_counter()
    warm = once()
    times = [warm] if warm > BUDGET_S else [once()]
    while len(times) < 15 and time.perf_counter() - began < BUDGET_S:
        times.append(once())
    return 2.0 * size**3 / statistics.median(times)
