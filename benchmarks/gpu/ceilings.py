"""Measure what bounds the other measurements: copies, a matrix product, and launches.

Dispatch reads a row and writes it K times, and combine reads K rows and writes one, so copies of rows with these ratios
are measured beside a plain copy.

python -m benchmarks.gpu.ceilings --results results.jsonl
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

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

ROWS = r"""
// A block copies a row of `width` 16-byte words at a time. One row is read and eight are written, or eight are read and
// their exclusive or is written.
extern "C" __global__ void fan_out(const uint4* __restrict__ from, uint4* __restrict__ to,
                                   const int* __restrict__ place, int rows, int width) {
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const uint4 value = from[(long long)row * width + i];
#pragma unroll
      for (int k = 0; k < 8; ++k) to[(long long)place[row * 8 + k] * width + i] = value;
    }
}
extern "C" __global__ void fan_in(const uint4* __restrict__ from, uint4* __restrict__ to,
                                  const int* __restrict__ place, int rows, int width) {
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      uint4 read[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) read[k] = from[(long long)place[row * 8 + k] * width + i];
      uint4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        sum.x ^= read[k].x;
        sum.y ^= read[k].y;
        sum.z ^= read[k].z;
        sum.w ^= read[k].w;
      }
      to[(long long)row * width + i] = sum;
    }
}
extern "C" __global__ void nothing(int) {}
"""
"""Copies of rows with the ratios of dispatch and combine at K 8, and a kernel without work."""


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


def row_copies(timer: Timer, rows: int, width: int) -> Iterator[dict[str, Any]]:
    """Yield the rates of ``fan_out`` and ``fan_in`` for bf16 rows of ``width`` channels at random places."""
    import cupy

    module = cupy.RawModule(code=ROWS)
    generator = torch.Generator("cuda").manual_seed(0)
    one = torch.randint(1 << 30, (rows, width // 2), dtype=torch.int32, device="cuda", generator=generator)
    eight = torch.zeros(8 * rows, width // 2, dtype=torch.int32, device="cuda")
    place = torch.randperm(8 * rows, device="cuda", generator=generator).to(torch.int32)
    back = torch.ones_like(one)
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    for name, source, target in (("fan_out", one, eight), ("fan_in", eight, back)):
        kernel = module.get_function(name)
        arguments = (*(cupy.from_dlpack(t) for t in (source, target, place)), cupy.int32(rows), cupy.int32(width // 8))
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            us = timer.many(partial(kernel, (blocks,), (448,), arguments))
        num_bytes = 9 * 2 * rows * width
        yield {"who": f"{name}, {rows} rows, {width} channels", "bytes": num_bytes, "device_us": us,
               "gb_s": num_bytes / us / 1e3}  # fmt: skip
    if not torch.equal(eight[place.view(rows, 8)[:, 3].long()], one) or back.any():  # eight equal values cancel
        raise AssertionError("the rows that were copied differ from their sources")


def launches(timer: Timer) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of one call of the smallest operations of each kind: the unit of other CPU times."""
    small = torch.zeros(1, device=timer.device)
    rows_RD = torch.zeros(64, 64, dtype=torch.bfloat16, device=timer.device)
    w_EDN = torch.zeros(8, 64, 64, dtype=torch.bfloat16, device=timer.device)
    ends_E = torch.arange(8, 72, 8, dtype=torch.int32, device=timer.device)
    work = {
        "torch empty": lambda: torch.empty(1, device=timer.device),
        "torch add_": lambda: small.add_(1),
        "F.grouped_mm": lambda: functional.grouped_mm(rows_RD, w_EDN, offs=ends_E),
    }
    if timer.device == "cuda" and importlib.util.find_spec("cupy"):
        import cupy

        kernel, stream = cupy.RawModule(code=ROWS).get_function("nothing"), torch.cuda.current_stream().cuda_stream
        with cupy.cuda.ExternalStream(stream):
            yield {"who": "null kernel by CuPy", "host_us": timer.host(partial(kernel, (1,), (32,), (cupy.int32(0),)))}
    if timer.device == "cuda" and importlib.util.find_spec("triton"):
        work["Triton kernel without work"] = _triton_nothing()
    for who, call in work.items():
        yield {"who": who, "host_us": timer.host(call)}


def _triton_nothing() -> Callable[[], Any]:
    import triton

    @triton.jit  # type: ignore[untyped-decorator]
    def nothing(x) -> None:  # type: ignore[no-untyped-def]
        pass

    x = torch.zeros(1, device="cuda")
    return lambda: nothing[(1,)](x)


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
        for rows in (4096, 8192):
            yield f"copies of {rows} rows by CuPy", partial(row_copies, timer, rows, 7168)
    yield "launches", partial(launches, timer)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "ceilings", operations, limit_s=20.0))
