"""Measure collectives and dispatch over the ranks of a group, as the planner's links are fitted to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.dispatch import make_dispatcher
from moe_comm.layers.parallel.collectives import gather_dim, scatter_sum
from moe_comm.train.parallel.compress import GradientReducer
from moe_plan.machine.link_fit import MeasuredTransfer

WIDTH = 256
"""Elements of a row."""


def wall_seconds(
    work: Callable[[], Any], times: int, windows: int, group: ProcessGroup | None = None, device: str = "cpu"
) -> float:
    """Return the wall seconds of ``work``: the median over windows of the mean of ``times`` calls. Collective.

    Args:
        windows: number of windows. The ranks of ``group`` begin each of them together.
        group: None: all ranks.
        device: "cuda": wait for the device at both ends of a window.
    """
    cuda = device.startswith("cuda")
    work()
    seconds = []
    for _ in range(windows):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier(group)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        if cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / times)
    return median(seconds)


def measure_sum(group: ProcessGroup, elements: int, windows: int, device: str = "cpu") -> MeasuredTransfer:
    """Measure the all-reduce of ``elements`` fp32 gradients. Collective over ``group``."""
    grads = [torch.ones(elements // 4, device=device, dtype=torch.float32) for _ in range(4)]
    times = max(1, min(8, (1 << 18) // elements))
    began, began_cpu = time.perf_counter(), time.process_time()
    seconds = wall_seconds(lambda: GradientReducer().sum_all(grads, group), times, windows, group, device)
    busy = min(1.0, (time.process_time() - began_cpu) / (time.perf_counter() - began))
    processor_s = busy * seconds if device == "cpu" else None
    return MeasuredTransfer("all_reduce", dist.get_world_size(group), 4 * elements, seconds, processor_s)


def measure_rows(group: ProcessGroup, rows: int, windows: int, device: str = "cpu") -> list[MeasuredTransfer]:
    """Measure transfers of ``rows`` fp32 rows of each rank. Collective over ``group``.

    The transfers are an all-gather, a reduce-scatter, dispatch and combine with one expert on each rank (the mean of
    both), and a message between two ranks. A rank without a partner returns no message.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    x_RD = torch.ones(rows, WIDTH, device=device, dtype=torch.float32)
    gathered = x_RD.repeat(size, 1)
    times = max(1, min(8, 1024 // rows))

    def seconds(work: Callable[[], Any]) -> float:
        return wall_seconds(work, times, windows, group, device)

    results = [
        MeasuredTransfer("all_gather", size, gathered.nbytes, seconds(lambda: gather_dim(x_RD, group, 0))),
        MeasuredTransfer("reduce_scatter", size, gathered.nbytes, seconds(lambda: scatter_sum(gathered, group, 0))),
    ]
    dispatcher = make_dispatcher(size, group)
    ids_T1 = (torch.arange(rows, device=device) % size).view(-1, 1)
    weights_T1 = torch.ones(rows, 1, device=device, dtype=torch.float32)

    def dispatch_and_combine() -> None:
        sent = dispatcher.dispatch(x_RD, ids_T1)
        rows_RD = sent.rows_RD
        out_RD = dispatcher.empty_rows(len(rows_RD), WIDTH, rows_RD.dtype, rows_RD.device)
        dispatcher.combine(out_RD.copy_(rows_RD), weights_T1, sent.handle)

    with closing(dispatcher):
        results.append(MeasuredTransfer("all_to_all", size, x_RD.nbytes, seconds(dispatch_and_combine) / 2))
    other, buffer = rank ^ 1, torch.empty_like(x_RD)

    def ping_pong() -> None:
        for sender in (0, 1) if other < size else ():
            if rank & 1 == sender:
                dist.send(x_RD, group=group, group_dst=other)
            else:
                dist.recv(buffer, group=group, group_src=other)

    sent_s = seconds(ping_pong) / 2
    return [*results, MeasuredTransfer("send", 2, x_RD.nbytes, sent_s)] if other < size else results
