"""Measurements on each rank of a calibration, by all ranks at once.

    products     torch.mm, several shapes            passes   forward and backward of two small models
    attention    torch's fused attention             moves    collectives and dispatch over all ranks and over pairs
    memory       the optimizer update

Local work is timed by CPU time, which excludes other processes on the same core. Communication is timed by wall time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_comm.bench.common.ranks import SingleRankMesh
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.runtime.launch import available_cores, init_ranks
from moe_comm.train import config as configuration
from moe_comm.train.auto.rates import WIDTH, measure_rows, measure_sum, wall_seconds
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.parallel.norm import squared_norm
from moe_plan.machine.link_fit import MeasuredTransfer

TIMEOUT_S = 300.0
BUDGET_S = 0.06
"""Time of one measurement, over all windows."""
WINDOWS = 5
"""Windows of a measurement. Each gives a mean; the result is their median."""
PRODUCTS = (
    (512, 512, 512),
    (1024, 512, 512),
    (512, 256, 1024),
    (256, 512, 256),
    (128, 256, 512),
    (64, 512, 512),
    (32, 256, 512),
    (16, 512, 512),
    (8, 256, 512),
    (256, 128, 128),
    (512, 128, 64),
)
"""(m, k, n) of [m, k] x [k, n] GEMMs."""
SEQUENCES = (128, 256, 512)
"""Sequence lengths of the attention measurement."""
EMULATED = ((256, 256, 256), (128, 256, 512), (64, 512, 512))
"""(m, k, n) of GEMMs in bf16, which cores may emulate."""
UPDATED = 4 << 20
"""Elements of the optimizer update."""
SUMMED = (1 << 16, 1 << 20, 1 << 22)
"""Elements of the gradient all-reduces."""
MODELS = (
    {"hidden": 192, "layers": 2, "heads": 4, "kv_heads": 4, "experts": 4, "top_k": 2, "ffn": 384, "vocab": 384},
    {"hidden": 320, "layers": 2, "heads": 5, "kv_heads": 5, "experts": 8, "top_k": 2, "ffn": 192, "vocab": 512},
)
"""Models whose passes are timed, with the size names of ``moe_comm.train``."""
BATCHES = ((1, 16), (1, 128), (2, 256))
"""(sequences, length) of the micro-batches."""
EXPERT_ROWS = (40, 96, 128, 248)
"""Rows of each expert in the grouped GEMM measurement, with D = F = ``WIDTH``."""
ROWS = (64, 512, 2048)
"""Rows per rank of the transfers."""


@dataclass(frozen=True)
class MeasuredPass:
    """Time of forward and backward of a micro-batch with the full model on each rank.

    Attributes:
        model: index in ``MODELS``.
        seconds: CPU time.
        together: wall time from a common start until all ranks are done; 0 if not measured.
    """

    model: int
    sequences: int
    seq_len: int
    seconds: float
    together: float = 0.0


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one rank. Times are in seconds.

    Attributes:
        products: (m, k, n, seconds) by dtype.
        attention: (sequence length, forward, backward) for ``HEADS`` heads.
        experts: forward and backward of experts with ``EXPERT_ROWS``.
        update: optimizer update of ``UPDATED`` elements.
    """

    cores: int
    products: dict[str, tuple[tuple[int, int, int, float], ...]]
    attention: tuple[tuple[int, float, float], ...]
    experts: float
    update: float
    memory_bytes: int
    passes: tuple[MeasuredPass, ...] = ()
    moves: tuple[MeasuredTransfer, ...] = field(default=())


HEADS, HEAD_DIM = 4, 64


def measure(what: Sequence[str]) -> RankMeasurements:
    """Measure on this rank. Collective over the default process group, which is created if there is none.

    Args:
        what: any of "products" (GEMMs, attention, memory), "passes" and "moves" (transfers).
    """
    torch.set_num_threads(1)
    with init_ranks("cpu", TIMEOUT_S) as ranks:
        torch.manual_seed(ranks.rank)
        measurements = RankMeasurements(
            cores=available_cores(),
            products={name: _products(name) for name in ("fp32", "bf16")} if "products" in what else {},
            attention=tuple(_attention(length) for length in SEQUENCES) if "products" in what else (),
            experts=_experts() if "products" in what else 0.0,
            update=_update() if "products" in what else 0.0,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks.world,
            passes=tuple(_passes()) if "passes" in what else (),
            moves=tuple(_moves(ranks.rank, ranks.world)) if "moves" in what and ranks.world > 1 else (),
        )
        _barrier()
    return measurements


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of ``work`` while all ranks measure the same work."""
    work()
    _barrier()
    windows = []
    for _ in range(WINDOWS):
        start, times = time.process_time(), 0
        while (spent := time.process_time() - start) < BUDGET_S / WINDOWS or not times:
            work()
            times += 1
        windows.append((time.process_time() - start) / times if times == 1 else spent / times)
    return median(windows)


def _until_all(work: Callable[[], Any]) -> float:
    """Return the wall seconds from a common start until all ranks have done ``work``."""

    def work_and_barrier() -> None:
        work()
        _barrier()

    return wall_seconds(work_and_barrier, 1, WINDOWS)


def _products(name: str) -> tuple[tuple[int, int, int, float], ...]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    results = []
    for m, k, n in PRODUCTS if name == "fp32" else EMULATED:
        a, b = torch.randn(m, k, dtype=dtype, device="cpu"), torch.randn(k, n, dtype=dtype, device="cpu")
        out = torch.empty(m, n, dtype=dtype, device="cpu")
        results.append((m, k, n, _cpu_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))))  # type: ignore[misc]
    return tuple(results)


def _attention(length: int) -> tuple[int, float, float]:
    q, k, v, grad = (
        torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True, dtype=torch.float32, device="cpu") for _ in range(4)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    grad = grad.detach()
    forward_s = _cpu_seconds(forward)
    total_s = _cpu_seconds(lambda: torch.autograd.grad(forward(), (q, k, v), grad))
    return length, forward_s, max(total_s - forward_s, 1e-9)


def _experts() -> float:
    """Return the seconds of forward and backward of experts with unequal numbers of rows."""
    experts = Experts(len(EXPERT_ROWS), WIDTH, WIDTH)
    rows_RD = torch.randn(sum(EXPERT_ROWS), WIDTH, requires_grad=True, dtype=torch.float32, device="cpu")
    grad_RD = torch.randn(sum(EXPERT_ROWS), WIDTH, dtype=torch.float32, device="cpu")
    leaves = (rows_RD, *experts.parameters())
    return _cpu_seconds(lambda: torch.autograd.grad(experts(rows_RD, EXPERT_ROWS), leaves, grad_RD))


def _update() -> float:
    """Return the seconds of gradient norm, clipping and AdamW for ``UPDATED`` elements."""
    params = [torch.nn.Parameter(torch.zeros(UPDATED // 4, dtype=torch.float32, device="cpu")) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)

    def update() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        sum(squared_norm(grad) for grad in grads)
        torch._foreach_mul_(grads, 0.999)
        optimizer.step()

    return _cpu_seconds(update)


def _passes() -> list[MeasuredPass]:
    results = []
    for index, sizes in enumerate(MODELS):
        overrides = [f"model.{key}={value}" for key, value in sizes.items()]
        config = configuration.load(None, [*overrides, "model.family=qwen3_moe", "model.init_std=0.1", "parallel.ep=1"])
        (model,) = build_stages(config, architecture_of(config, sizes["vocab"]), SingleRankMesh())
        initialize(model, 0)
        for sequences, length in BATCHES:
            ids = torch.randint(0, sizes["vocab"], (sequences, length), device="cpu")

            def step(model: Any = model, ids: Any = ids) -> None:
                model.loss(model(ids), ids).backward()

            seconds = _cpu_seconds(step)
            large = (sequences, length) == BATCHES[-1]
            results.append(MeasuredPass(index, sequences, length, seconds, _until_all(step) if large else 0.0))
        model.close()
    return results


def _moves(rank: int, world: int) -> list[MeasuredTransfer]:
    assert dist.group.WORLD is not None
    groups = [dist.group.WORLD]
    if world > 2:
        for first in range(0, world - 1, 2):
            pair = dist.new_group([first, first + 1])
            if rank in (first, first + 1):
                groups.append(pair)
    results: list[MeasuredTransfer] = []
    for group in groups:
        results += [transfer for rows in ROWS for transfer in measure_rows(group, rows, WINDOWS)]
        results += [measure_sum(group, elements, WINDOWS) for elements in SUMMED]
        _barrier()
    return results
