"""How fast a plain matrix product is here: what model FLOPs utilisation is measured against."""

from __future__ import annotations

import statistics
import time

import torch

BUDGET_S = 0.3
"""About how long a measurement may take: where bf16 is emulated, one large product takes seconds."""


def gemm_flops(dtype: torch.dtype = torch.float32, device: str = "cpu", size: int | None = None) -> float:
    """FLOP/s of this process's ``torch.mm`` of square matrices, the median of several, with the threads it has.

    Ranks that share a machine call it together, or each measures a rate that all of them cannot have at once.

    Args:
        size: of the matrices; None: large enough for the best rate, but smaller where that takes long.
    """
    cuda = device.startswith("cuda")
    if size is None:
        size = 8192 if cuda else 768
        if not cuda and 2.0 * size**3 / gemm_flops(dtype, device, 128) > BUDGET_S:
            size = 256
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
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
