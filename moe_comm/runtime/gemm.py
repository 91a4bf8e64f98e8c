"""How fast a plain matrix product is here: what model FLOPs utilisation is measured against."""

from __future__ import annotations

import statistics
import time

import torch


def gemm_flops(dtype: torch.dtype = torch.float32, device: str = "cpu", size: int | None = None) -> float:
    """FLOP/s of this process's ``torch.mm`` of square matrices, the median of several, with the threads it has.

    Ranks that share a machine call it together, or each measures a rate that all of them cannot have at once.
    """
    cuda = device.startswith("cuda")
    size = size or (8192 if cuda else 768)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)

    def once() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        once()
    return 2.0 * size**3 / statistics.median(once() for _ in range(15))
