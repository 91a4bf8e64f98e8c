"""Measure the ranks of a run as a cluster for the planner, in a few seconds.

    each rank     GEMMs of the model's widths, experts, a copy in memory          ──▶ Accelerator
    each host     transfers between its ranks                                     ──▶ Link inside
    every rail    transfers between the ranks with the same number on each host   ──▶ Link between

All ranks, hosts and rails measure at the same time, so the rates are those of one rank while all of them work. Numbers
that do not follow from these measurements are typical of calibrations (``moe-comm plan --calibrate``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.dispatch import make_dispatcher
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.parallel.collectives import channel_of, gather_dim, scatter_sum
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.runtime.groups import host_key
from moe_comm.runtime.launch import within_quota
from moe_comm.runtime.native_core import native_is_built
from moe_comm.train.parallel.compress import GradientReducer
from moe_comm.train.ranks import Ranks
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile
from moe_plan.machine.link_fit import MeasuredTransfer, between_of, inside_of

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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WINDOWS = 3
GEMM_S, MOST_ROWS, MOST_ELEMENTS = 0.03, 512, 1 << 24
"""Bounds of a measured GEMM: seconds at the best rate, rows, and elements of the weights."""
COPIED = 1 << 26
"""Bytes of the measured copy."""
ROWS = {"cpu": (64, 1024, 4096), "cuda": (64, 4096, 65536)}
"""Rows of each rank in the measured transfers."""
SLOW_S = 0.03
"""No larger transfer is measured after an all-reduce that takes longer."""
CPU: dict[str, Any] = {
    "launch_s": 7.5e-5,
    "attention_forward": 0.27,
    "attention_backward": 0.29,
    "memory_reach": 1.0,
}
"""Numbers of a CPU rank that are not measured; typical of its calibrations."""
NO_LINK = Link("memory of one rank", 1e9, 0.0, 1.0)


@dataclass(frozen=True)
class RankRates:
    """Rates of one rank.

    peak, dense, experts: FLOP/s of the best GEMM, of GEMMs of the model's hidden size, and of its experts in forward
    and backward. memory: bytes read and written per second. memory_bytes: memory of the rank's host or GPU. cores: ids
    of the cores on which the rank may run. quota: cores that the ranks of a host may use together. threads: that
    compute. host: key of the host.
    """

    peak: float
    dense: float
    experts: float
    memory: float
    memory_bytes: int
    cores: Sequence[int]
    quota: int
    threads: int
    host: str


def measure_cluster(ranks: Ranks, shape: ModelShape, dtype: str, tokens: int, device: str) -> Cluster:
    """Measure the ranks of a run. Collective. The result is the same on all ranks.

    Args:
        shape: the model. GEMMs and experts of its widths are measured.
        dtype: "fp32" or "bf16", as in ``Workload``.
        tokens: tokens of a micro-batch on a rank.
        device: "cpu" or "cuda".
    """
    ranks.barrier()
    rates = json.dumps(asdict(_measure_rank(shape, dtype, tokens, device)))
    by_rank = [RankRates(**json.loads(text)) for text in ranks.gather_texts(rates)]
    size = host_size([report.host for report in by_rank])
    first_host = [report.cores for report in by_rank if report.host == by_rank[0].host]
    cores = min(len(set().union(*first_host)), by_rank[0].quota)
    shared = max(1.0, size / cores) if device == "cpu" else 1.0
    cluster = Cluster(
        _accelerator(by_rank, dtype, size, shared, device),
        ranks.world,
        size,
        NO_LINK,
        NO_LINK,
        direct=device == "cpu" and native_is_built(),
    )
    if size > 1:
        with _groups(ranks, [range(first, first + size) for first in range(0, ranks.world, size)]) as group:
            cluster = inside_of(cluster, _transfers(ranks, group, device))
            cluster = replace(cluster, between=cluster.inside)
    if size < ranks.world:
        with _groups(ranks, [range(first, ranks.world, size) for first in range(size)]) as group:
            spare_cores = cores >= 2 * size * by_rank[0].threads
            transfers = _transfers(ranks, group, device)
            between = between_of(cluster, transfers, "link between hosts", spare_cores=spare_cores)
            cluster = replace(cluster, between=between)
    return cluster


def host_size(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each host, given the host of each rank.

    The result is 1 if hosts have different numbers of ranks, or ranks that are not consecutive: the planner then prices
    all transfers as those between hosts.
    """
    counts = {len(list(group)) for _, group in groupby(hosts)}
    consecutive = len(set(hosts)) == sum(1 for _ in groupby(hosts))
    return counts.pop() if consecutive and len(counts) == 1 else 1


def _measure_rank(shape: ModelShape, dtype: str, tokens: int, device: str) -> RankRates:
    torch_dtype, cuda = DTYPES[dtype], device.startswith("cuda")
    peak = gemm_flops(torch_dtype, device)
    width = shape.hidden
    rows = _rows(tokens, 2 * width**2, peak)
    a, b = (torch.full((count, width), 0.01, dtype=torch_dtype, device=device) for count in (rows, width))
    out = torch.empty(rows, width, dtype=torch_dtype, device=device)
    dense = 2 * rows * width**2 / wall_seconds(lambda: torch.mm(a, b, out=out), 4, WINDOWS, device=device)
    source = torch.ones(COPIED // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    memory = 2 * COPIED / wall_seconds(lambda: target.copy_(source), 1, WINDOWS, device=device)
    total = torch.cuda.mem_get_info()[1] if cuda else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    experts = _measure_experts(shape, torch_dtype, tokens, peak, device) if shape.moe_layers else dense
    cores, quota = sorted(os.sched_getaffinity(0)), within_quota(os.cpu_count() or 1)
    return RankRates(peak, dense, experts, memory, total, cores, quota, torch.get_num_threads(), host_key())


def _measure_experts(shape: ModelShape, dtype: torch.dtype, tokens: int, peak: float, device: str) -> float:
    """Return the FLOP/s of a few experts in forward and backward, with the rows of balanced routing."""
    elements = 3 * shape.hidden * shape.ffn
    count = max(1, min(8, shape.experts, MOST_ELEMENTS // elements))
    rows = _rows(tokens * shape.top_k / shape.experts, 6 * count * elements, peak)
    experts = Experts(count, shape.hidden, shape.ffn, dtype=dtype, device=device)
    x_RD = torch.full((count * rows, shape.hidden), 0.01, dtype=dtype, device=device, requires_grad=True)
    leaves = (x_RD, *experts.parameters())
    for parameter in experts.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    grad_RD = torch.ones_like(x_RD)

    def passes() -> None:
        torch.autograd.grad(experts(x_RD, (rows,) * count), leaves, grad_RD)

    return 6 * count * rows * elements / wall_seconds(passes, 2, WINDOWS, device=device)


def _rows(wanted: float, flops_per_row: float, peak: float) -> int:
    return max(1, min(round(wanted), MOST_ROWS, int(GEMM_S * peak / flops_per_row)))


def _accelerator(by_rank: Sequence[RankRates], dtype: str, size: int, shared: float, device: str) -> Accelerator:
    def mean(name: str) -> float:
        return fmean(getattr(report, name) for report in by_rank)

    cuda = device.startswith("cuda")
    peak = max(mean("peak"), mean("dense"))
    dense = mean("dense")
    memory_bytes = min(report.memory_bytes for report in by_rank) // (1 if cuda else size)
    accelerator = Accelerator(
        f"{device} rank",
        flops={dtype: peak},
        efficiency={dtype: 1.0},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=mean("memory"),
        units=1,
        tiles=(GemmTile(1, 1),),
        fill_k=0,
        sustained=dense / peak,
        grouped=min(1.0, mean("experts") / dense),
        shared=shared,
    )
    return accelerator if cuda else replace(accelerator, **CPU)


@contextmanager
def _groups(ranks: Ranks, members: Sequence[range]) -> Iterator[ProcessGroup]:
    """Create a process group for each of ``members``, and yield that of this rank. Collective."""
    assert ranks.world_group is not None
    if len(members) == 1:
        yield ranks.world_group
        return
    timeout = timedelta(seconds=channel_of(ranks.world_group).timeout_s)
    groups = {group_ranks: dist.new_group(list(group_ranks), timeout=timeout) for group_ranks in members}
    try:
        yield next(group for group_ranks, group in groups.items() if ranks.rank in group_ranks)
    finally:
        for group_ranks, group in groups.items():
            if ranks.rank in group_ranks:
                dist.destroy_process_group(group)


def _transfers(ranks: Ranks, group: ProcessGroup, device: str) -> list[MeasuredTransfer]:
    """Measure transfers over ``group``, and return their mean times over all groups. Collective over all ranks."""
    measured: list[MeasuredTransfer] = []
    for rows in ROWS["cuda" if device.startswith("cuda") else "cpu"]:
        measured += measure_rows(group, rows, WINDOWS, device)
        measured.append(measure_sum(group, rows * WIDTH, WINDOWS, device))
        if float(ranks.sum(torch.tensor([float(measured[-1].seconds > SLOW_S)], dtype=torch.float32, device="cpu"))):
            break
    by_key: dict[tuple[object, ...], list[MeasuredTransfer]] = {}
    for text in ranks.gather_texts(json.dumps([asdict(transfer) for transfer in measured])):
        for transfer in (MeasuredTransfer(**values) for values in json.loads(text)):
            by_key.setdefault((transfer.kind, transfer.ranks, transfer.num_bytes), []).append(transfer)
    return [replace(same[0], seconds=fmean(transfer.seconds for transfer in same)) for same in by_key.values()]


def rates_text(cluster: Cluster, dtype: str) -> str:
    """Return the rates of a cluster in a few words."""
    gpu = cluster.accelerator
    flops = gpu.peak(dtype) * gpu.efficiency[dtype] * gpu.sustained
    parts = [f"{flops / 1e9:,.3g} GFLOP/s a rank"]
    parts += [f"{cluster.inside.rate / 1e9:.3g} GB/s inside a host"] if min(cluster.gpus, cluster.host_size) > 1 else []
    parts += [f"{cluster.between.rate / 1e9:.3g} GB/s between hosts"] if cluster.hosts > 1 else []
    return ", ".join(parts)
