"""Device and host times of an operation.

Four times are measured separately, to tell launch-bound operations from bandwidth-bound ones:

    host_us     until the call returns
    device_us   between two CUDA events around the call: kernels, and gaps in which the device waits for the host
    kernels_us  sum over the kernels, from torch's profiler (CUPTI)
    graph_us    one replay of a CUDA graph of the call, for operations that can be captured

On a CPU, ``device_us`` is wall time and the last two are absent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KERNELS = 12
"""Number of kernels listed by name."""


@dataclass(frozen=True)
class Timer:
    """Measures operations on ``world`` ranks by ``iterations`` calls, after ``warmup`` calls that are discarded."""

    device: str
    warmup: int = 3
    iterations: int = 20
    world: int = 1

    def measure(self, work: Callable[[], Any], *, kernels: bool = True) -> dict[str, Any]:
        """Return the median times of ``work`` in microseconds, those of the device on the slowest rank.

        Args:
            kernels: also profile, and list the longest kernels.
        """
        host, device = [], []
        for i in range(self.warmup + self.iterations):
            began = time.perf_counter()
            if self.device == "cuda":
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                work()
                after.record()
                returned = time.perf_counter()
                after.synchronize()
                elapsed = before.elapsed_time(after) * 1e3
            else:
                work()
                returned = time.perf_counter()
                elapsed = (returned - began) * 1e6
            if i >= self.warmup:
                host.append((returned - began) * 1e6)
                device.append(elapsed)
        times: dict[str, Any] = {"host_us": statistics.median(host), "device_us": statistics.median(device)}
        if self.world > 1:
            slowest = torch.tensor(times["device_us"], device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times["device_us"] = float(slowest)
        if kernels and self.device == "cuda":
            times |= self.kernels(work)
        return times

    def kernels(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Return the time of all kernels of ``work``, and of the longest by name, in microseconds per call."""
        from torch.profiler import ProfilerActivity, profile

        calls = min(self.iterations, 10)
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(calls):
                    work()
                torch.cuda.synchronize()
            found = {
                event.key: (event.self_device_time_total / calls, event.count / calls)
                for event in profiler.key_averages()
                if event.device_type == torch.autograd.DeviceType.CUDA
            }
        except Exception as error:  # CUPTI may be missing or refused; the other times are still valid
            return {"kernels_us": None, "profiler_error": f"{type(error).__name__}: {error}"[:500]}
        if not found:
            return {"kernels_us": None, "profiler_error": "no kernels were recorded"}
        longest = sorted(found.items(), key=lambda item: -item[1][0])[:KERNELS]
        return {
            "kernels_us": sum(us for us, _ in found.values()),
            "launches": sum(count for _, count in found.values()),
            "kernels": {name[:120]: round(us, 2) for name, (us, _) in longest},
        }

    def graph(self, work: Callable[[], Any], replays: int = 50) -> dict[str, Any]:
        """Return the time of one replay of a CUDA graph of ``work`` in microseconds; nothing on a CPU.

        If the capture fails, return its error, so that the other times of the operation are kept.
        """
        if self.device != "cuda":
            return {}
        try:
            return self._graph(work, replays)
        except Exception as error:
            return {"graph_error": f"{type(error).__name__}: {error}"[:500]}

    def _graph(self, work: Callable[[], Any], replays: int) -> dict[str, Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for _ in range(self.warmup):
            graph.replay()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(replays):
            graph.replay()
        after.record()
        after.synchronize()
        return {"graph_us": before.elapsed_time(after) * 1e3 / replays}

    def many(self, work: Callable[[], Any], calls: int = 20) -> float:
        """Return the microseconds of one of ``calls`` calls in a row, without synchronisation between them."""
        for _ in range(self.warmup):
            work()
        if self.device != "cuda":
            began = time.perf_counter()
            for _ in range(calls):
                work()
            return (time.perf_counter() - began) * 1e6 / calls
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(calls):
            work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3 / calls

    def host(self, work: Callable[[], Any], calls: int = 200) -> float:
        """Return the median microseconds until one of ``calls`` calls returns; the device must not limit them."""
        times = []
        for _ in range(calls + self.warmup):
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1e6)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return statistics.median(times[self.warmup :])


def copy_gb_s(timer: Timer, num_bytes: int) -> float:
    """Return the rate of ``copy_`` in GB/s, counting bytes read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.many(lambda: target.copy_(source)) / 1e3


def gemm_tflop_s(timer: Timer, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the rate of ``torch.mm`` of square matrices of random values in TFLOP/s."""
    a, b = (random(timer.device, size, size, dtype=dtype, seed=seed) for seed in (0, 1))
    out = torch.empty_like(a)
    return 2e-6 * size**3 / timer.many(lambda: torch.mm(a, b, out=out))


def random(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return normally distributed values that are generated on the device."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)
