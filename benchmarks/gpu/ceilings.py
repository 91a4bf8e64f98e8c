"""Measure the copy rate and the matrix product rate of the device: the upper bounds of the other measurements.

python -m benchmarks.gpu.ceilings --results results.jsonl
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.record import Work, run_part
from benchmarks.gpu.timing import Timer, copy_gb_s, gemm_tflop_s

COPY = r"""
extern "C" __global__ void copy16(const uint4* __restrict__ from, uint4* __restrict__ to, long long count) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
    uint4 kept[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j * step < count) kept[j] = from[i + j * step];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j * step < count) to[i + j * step] = kept[j];
  }
}
"""
"""A copy kernel. Each thread issues four 16-byte loads before it stores, like the kernels of ``peer_to_peer``."""


def copies(timer: Timer, num_bytes: int) -> dict[str, Any]:
    """Return the rate of ``copy_``."""
    return {"who": "torch copy_", "bytes": num_bytes, "gb_s": copy_gb_s(timer, num_bytes)}


def cupy_copy(timer: Timer, num_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the rate of ``COPY`` for several numbers of blocks, which shows how many blocks reach the full rate."""
    import cupy

    kernel = cupy.RawModule(code=COPY).get_function("copy16")
    source = torch.arange(num_bytes // 4, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    source_c, target_c = cupy.from_dlpack(source), cupy.from_dlpack(target)  # no copies
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for blocks in (8, 16, 24, 64, processors, 2 * processors, 8 * processors):
        launch = partial(kernel, (blocks,), (512,), (source_c, target_c, num_bytes // 16))
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            us = timer.many(launch)
        yield {"who": f"cupy.RawModule copy, {blocks} blocks", "bytes": num_bytes, "gb_s": 2 * num_bytes / us / 1e3}
    if not torch.equal(source, target):
        raise AssertionError("the copy of the CuPy kernel differs from its source")


def products(timer: Timer, size: int) -> dict[str, Any]:
    """Return the rate of a square bf16 product."""
    return {"who": "torch.mm, bfloat16", "size": size, "tflop_s": gemm_tflop_s(timer, size)}


def operations(device: str) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the measurements."""
    timer = Timer(device)
    cuda = device == "cuda"
    for num_bytes in (1 << 28, 1 << 30) if cuda else (1 << 20,):
        yield f"copy of {num_bytes >> 20} MiB", partial(copies, timer, num_bytes)
    size = 8192 if cuda else 128
    yield f"product of {size}", partial(products, timer, size)
    if cuda and importlib.util.find_spec("cupy"):
        yield "copy by CuPy", partial(cupy_copy, timer, 1 << 30)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "ceilings", operations, limit_s=20.0))
