"""What each rank of a calibration measures, all of them at once, through what a training step runs.

    products     torch's, of several shapes            passes   forward and backward of two small models, whole
    attention    torch's fused one                     moves    collectives and dispatch, over all ranks and over pairs
    memory       passes of the optimizer

What one rank does by itself is timed by the processor time it takes: others that want the same core do not count, and
neither do they on a quiet machine. What ranks do together is timed by the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_comm.dispatch import make_dispatcher
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.parallel.collectives import gather_dim, scatter_sum
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.runtime.launch import available_cores, init_ranks
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.parallel.compress import Wire
from moe_comm.train.parallel.norm import squared_norm

TIMEOUT_S = 300.0
BUDGET_S = 0.06
"""Of one window of a measurement, from which a mean is taken."""
WINDOWS = 5
"""Of them the median counts."""
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
"""[m, k] x [k, n]."""
SEQUENCES = (128, 256, 512)
"""Lengths for attention."""
EMULATED = ((256, 256, 256), (128, 256, 512), (64, 512, 512))
"""Those in dtypes that cores may lack."""
UPDATED = 4 << 20
"""Elements that the optimizer updates, in a few large parameters."""
SUMMED = (1 << 16, 1 << 20, 1 << 22)
"""Elements of gradients that are summed."""
MODELS = (
    {"hidden": 192, "layers": 2, "heads": 4, "kv_heads": 4, "experts": 4, "top_k": 2, "ffn": 384, "vocab": 384},
    {"hidden": 320, "layers": 2, "heads": 5, "kv_heads": 5, "experts": 8, "top_k": 2, "ffn": 192, "vocab": 512},
)
"""Whole models whose passes are timed, as ``moe_comm.train``'s settings name their sizes."""
BATCHES = ((1, 16), (1, 128), (2, 256))
"""Sequences and their length, of a micro-batch."""
EXPERT_ROWS = (40, 96, 128, 248)
"""Of each of some experts, ``WIDTH`` wide in and inside."""
ROWS = (64, 512, 2048)
"""Rows that a rank has, where they travel."""
WIDTH = 256

MoveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class Moving:
    """A transfer. ranks: of its group, which are ``stride`` apart. num_bytes: as ``Cluster``'s method takes it."""

    kind: MoveKind
    ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Passed:
    """Forward and backward of a micro-batch on one rank that has the whole model. model: place in ``MODELS``.

    seconds: of a processor. together: by the clock, until all ranks that began at once have ended; 0: not measured.
    """

    model: int
    sequences: int
    seq_len: int
    seconds: float
    together: float = 0.0


@dataclass(frozen=True)
class Found:
    """What a rank measured; seconds of each. attention: (sequence, forward, backward) for ``HEADS`` heads. experts: of
    ``EXPERT_ROWS`` through theirs, forward and backward."""

    cores: int
    products: dict[str, tuple[tuple[int, int, int, float], ...]]
    attention: tuple[tuple[int, float, float], ...]
    experts: float
    update: float
    memory_bytes: int
    passes: tuple[Passed, ...] = ()
    moves: tuple[Moving, ...] = field(default=())


HEADS, HEAD_DIM = 4, 64


def measure(what: Sequence[str]) -> Found:
    """One rank's part. Collective over all ranks of the default process group, which is made if there is none.

    what: of "products", "passes" and "moves", those that are wanted.
    """
    torch.set_num_threads(1)
    with init_ranks("cpu", TIMEOUT_S) as here:
        torch.manual_seed(here.rank)
        found = Found(
            cores=available_cores(),
            products={name: _products(name) for name in ("fp32", "bf16")} if "products" in what else {},
            attention=tuple(_attention(length) for length in SEQUENCES) if "products" in what else (),
            experts=_experts() if "products" in what else 0.0,
            update=_update() if "products" in what else 0.0,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here.world,
            passes=tuple(_passes()) if "passes" in what else (),
            moves=tuple(_moves(here.rank, here.world)) if "moves" in what and here.world > 1 else (),
        )
        _barrier()
    return found


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def _alone(work: Callable[[], Any]) -> float:
    """Processor seconds of ``work``, while all other ranks measure the same."""
    work()
    _barrier()
    windows = []
    for _ in range(WINDOWS):
        began, times = time.process_time(), 0
        while (spent := time.process_time() - began) < BUDGET_S / WINDOWS or not times:
            work()
            times += 1
        windows.append((time.process_time() - began) / times if times == 1 else spent / times)
    return median(windows)


def _together(work: Callable[[], Any], times: int) -> float:
    """Seconds of ``work`` by the clock: the median over windows of means over a few calls."""
    work()
    windows = []
    for _ in range(WINDOWS):
        _barrier()
        began = time.perf_counter()
        for _ in range(times):
            work()
        windows.append((time.perf_counter() - began) / times)
    return median(windows)


def _until_all(work: Callable[[], Any]) -> float:
    """Seconds by the clock from a common start until the last rank has done ``work``: the median of several."""

    def both() -> None:
        work()
        _barrier()

    return _together(both, 1)


def _products(name: str) -> tuple[tuple[int, int, int, float], ...]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    found = []
    for m, k, n in PRODUCTS if name == "fp32" else EMULATED:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=dtype)
        found.append((m, k, n, _alone(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))))  # type: ignore[misc]
    return tuple(found)


def _attention(length: int) -> tuple[int, float, float]:
    q, k, v, grad = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(4))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    grad = grad.detach()
    one = _alone(forward)
    both = _alone(lambda: torch.autograd.grad(forward(), (q, k, v), grad))
    return length, one, max(both - one, 1e-9)


def _experts() -> float:
    """Seconds of experts with unequal numbers of rows, forward and backward."""
    experts = Experts(len(EXPERT_ROWS), WIDTH, WIDTH)
    rows_RD = torch.randn(sum(EXPERT_ROWS), WIDTH, requires_grad=True)
    grad_RD = torch.randn(sum(EXPERT_ROWS), WIDTH)
    wanted = (rows_RD, *experts.parameters())
    return _alone(lambda: torch.autograd.grad(experts(rows_RD, EXPERT_ROWS), wanted, grad_RD))


def _update() -> float:
    """Seconds of what follows backward for ``UPDATED`` elements: their norm, clipping by it, AdamW."""
    parts = [torch.nn.Parameter(torch.zeros(UPDATED // 4)) for _ in range(4)]
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer = torch.optim.AdamW(parts, fused=True)

    def update() -> None:
        grads = [part.grad for part in parts if part.grad is not None]
        sum(squared_norm(grad) for grad in grads)
        torch._foreach_mul_(grads, 0.999)
        optimizer.step()

    return _alone(update)


def _passes() -> list[Passed]:
    found = []
    for place, sizes in enumerate(MODELS):
        given = [f"model.{key}={value}" for key, value in sizes.items()]
        config = configuration.load(None, [*given, "model.family=qwen3_moe", "model.init_std=0.1", "parallel.ep=1"])
        (model,) = build_stages(config, architecture_of(config, sizes["vocab"]), _alone_mesh())
        initialize(model, 0)
        for sequences, length in BATCHES:
            ids = torch.randint(0, sizes["vocab"], (sequences, length))

            def step(model: Any = model, ids: Any = ids) -> None:
                model.loss(model(ids), ids).backward()

            seconds = _alone(step)
            large = (sequences, length) == BATCHES[-1]
            found.append(Passed(place, sequences, length, seconds, _until_all(step) if large else 0.0))
        model.close()
    return found


def _alone_mesh() -> Any:
    """The mesh of a rank that trains by itself."""

    class Alone(ParallelMesh):
        def __init__(self) -> None:
            self.config, self.device, self.rank = ParallelConfig(), "cpu", 0
            self.place, self.sizes = self.config.place(0), self.config.sizes
            self.attention = self.expert = None
            self._groups, self._tied = {}, None

    return Alone()


def _moves(rank: int, world: int) -> list[Moving]:
    groups = [(world, dist.group.WORLD)]
    if world > 2:
        made: Any = None
        for first in range(0, world - 1, 2):
            one = dist.new_group([first, first + 1])
            made = one if rank in (first, first + 1) else made
        if made is not None:
            groups.append((2, made))
    found: list[Moving] = []
    for size, group in groups:
        found += [one for rows in ROWS for one in _moves_of(size, group, rows)]
        found += [_sums_of(size, group, elements) for elements in SUMMED]
        _barrier()
    return found


def _sums_of(size: int, group: Any, elements: int) -> Moving:
    """Gradients, as data-parallel ranks sum them."""
    parts = [torch.randn(elements // 4) for _ in range(4)]
    times = max(1, min(8, (1 << 20) // elements))
    return Moving("all_reduce", size, 4 * elements, _together(lambda: Wire().sum_all(parts, group), times))


def _moves_of(size: int, group: Any, rows: int) -> list[Moving]:
    x_RD = torch.randn(rows, WIDTH)
    whole = x_RD.repeat(size, 1)
    times = max(1, min(8, 4096 // rows))
    found = [
        Moving("all_gather", size, whole.nbytes, _together(lambda: gather_dim(x_RD, group, 0), times)),
        Moving("reduce_scatter", size, whole.nbytes, _together(lambda: scatter_sum(whole, group, 0), times)),
    ]
    dispatcher = make_dispatcher(size, group)
    ids_T1 = (torch.arange(rows) % size).view(-1, 1)
    weights_T1 = torch.ones(rows, 1)

    def there_and_back() -> None:
        sent = dispatcher.dispatch(x_RD, ids_T1)
        rows_RD = sent.rows_RD
        out_RD = dispatcher.empty_rows(len(rows_RD), WIDTH, rows_RD.dtype, rows_RD.device)
        dispatcher.combine(out_RD.copy_(rows_RD), weights_T1, sent.handle)

    found.append(Moving("all_to_all", size, x_RD.nbytes, _together(there_and_back, times) / 2))
    dispatcher.close()
    here, room = dist.get_rank(group), torch.empty_like(x_RD)
    other = here ^ 1

    def swap() -> None:
        """There, then back, so that one way at a time is on its way."""
        for sender in (0, 1):
            if here & 1 == sender:
                dist.send(x_RD, group=group, group_dst=other)
            else:
                dist.recv(room, group=group, group_src=other)

    if other < size:
        found.append(Moving("send", 2, x_RD.nbytes, _together(swap, times) / 2))
    return found
