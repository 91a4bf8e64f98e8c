"""Profile the CPU in a forward and a backward of ``MoELayer``: operators and launches by time, and Python functions.

    python -m benchmarks.gpu.host_profile qwen3-30b-a3b --results results.jsonl

``host_us`` is the time of an operator on the CPU without the operators that it calls (torch's profiler), or of a Python
function without the functions that it calls (cProfile, which makes them slower). The rows "all" have the number of
calls of all functions, of those of this package, and of launches.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.layers import SHAPES
from benchmarks.gpu.record import Work, run_part
from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.benchmark import KINDS, ContestantRun, make_inputs
from moe_comm.layers.moe.experts import Experts

CALLS = 10
LONGEST = 25
"""Number of operators and of functions in the results."""


def by_operator(what: str, work: Callable[[], object], device: str) -> Iterator[dict[str, Any]]:
    """Yield a row of each of the operators and CUDA API calls with the most CPU time, in microseconds per call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(CALLS):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    yield {"who": "all", "what": f"{what}, operators", "host_us": sum(e.self_cpu_time_total for e in events) / CALLS,
           "calls": sum(event.count for event in events) / CALLS, "launches": launches / CALLS}  # fmt: skip
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:LONGEST]:
        yield {"who": event.key[:120], "what": f"{what}, operators", "host_us": event.self_cpu_time_total / CALLS,
               "calls": event.count / CALLS}  # fmt: skip


def by_function(what: str, work: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """Yield a row of each of the Python functions with the most CPU time, in microseconds per call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(CALLS):
        work()
    profiler.disable()
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = sum(calls for (file, _, _), (_, calls, *_) in found.items() if "/moe_comm/" in file)
    total = sum(calls for _, calls, *_ in found.values())
    yield {"who": "all", "what": f"{what}, functions", "calls": total / CALLS, "package_calls": own / CALLS}
    longest = sorted(found.items(), key=lambda item: -item[1][2])[:LONGEST]
    for (file, line, name), (_, calls, self_s, *_) in longest:
        where = f"{file.rpartition('/')[2]}:{line} {name}" if line else name
        yield {"who": where[:120], "what": f"{what}, functions", "host_us": self_s * 1e6 / CALLS,
               "calls": calls / CALLS}  # fmt: skip


def measure(shape: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a forward, and of a forward with its backward."""
    settings = LayerBench(ranks=1, dtype="bfloat16", device=device, **SHAPES[shape])  # type: ignore[arg-type]
    x_TD, grad_TD = make_inputs(settings, 0)
    with mock.patch.object(Experts, "reset_parameters"):  # see layers.py
        run = ContestantRun(KINDS["moe_comm_ep1"](settings, 0), x_TD, grad_TD)

    def both() -> None:
        run.forward()
        run.backward()
        run.free()

    try:
        both()
        for what, work in (("forward", run.forward), ("forward and backward", both)):
            yield from by_operator(what, work, device)
            yield from by_function(what, work)
    finally:
        run.contestant.close()


def operations(shape: str, device: str) -> Iterator[tuple[str, Work]]:
    """Yield the name and function of the profile of a shape."""
    yield f"{shape}, profile", lambda: measure(shape, device)


if __name__ == "__main__":
    raise SystemExit(run_part(__doc__, "host-profile", operations, limit_s=40.0, shapes=SHAPES))
