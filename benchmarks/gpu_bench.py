"""What ``peer_to_peer`` costs on one GPU, beside plain torch and what the machine can do at best, in one JSON file.

    python benchmarks/gpu_bench.py dispatch --json dispatch-p2p.json
    python benchmarks/gpu_bench.py few --json few-p2p.json
    python benchmarks/gpu_bench.py virtual --json virtual-p2p.json
    python benchmarks/gpu_bench.py host --json host-p2p.json

``dispatch``: dispatch and combine of many tokens. ``few``: of 1 to 256. ``virtual``: of 2, 4 and 8 ranks in this one
process, a stream each, which share the GPU and its memory's rate. ``host``: how long a layer's forward, and dispatch
and combine alone, keep the host. One rank holds all experts, so every row moves within the GPU's memory; under
torchrun every rank has its GPU and its share of the experts, tokens are those of each rank, and the slowest rank's time
counts.
``--device cpu`` runs the same kernels emulated, to see that this script works; its times mean nothing.

The limits: a row that is dispatched or combined is read and written as ``torch.Tensor.copy_`` moves bytes, measured in
the same run. Dispatch reads T rows and writes T K; combine reads T K and writes T.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.bench.common import machine
from moe_comm.dispatch import Dispatcher, DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.peer_to_peer.virtual import run_ranks, virtual_ranks
from moe_comm.gpu.heap import heap_bytes
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement

ERROR_BOUND, FP8_ERROR_BOUND = 2e-2, 8e-2
"""How far from the reference y may be, over its largest element: rows round to bfloat16, or to e4m3 on their way."""


@dataclass(frozen=True)
class Settings:
    """The command line. Tokens T (several), hidden D, experts E, top-k K."""

    device: str
    tokens: tuple[int, ...]
    hidden: int
    experts: int
    top_k: int
    warmup: int
    iterations: int
    world: int = 1

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks, if there are several."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def row_bytes(self) -> int:
        """In bfloat16."""
        return 2 * self.hidden


def milliseconds(work: Callable[[], Any], settings: Settings) -> float:
    """Median time of ``work``, as the device sees it from one end of the queue to the other."""
    cuda = settings.device == "cuda"
    times = []
    for i in range(settings.warmup + settings.iterations):
        if cuda:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            work()
            after.record()
            after.synchronize()
            took = before.elapsed_time(after)
        else:
            start = time.perf_counter()
            work()
            took = (time.perf_counter() - start) * 1e3
        if i >= settings.warmup:
            times.append(took)
    slowest = torch.tensor(statistics.median(times), device=settings.device)
    if settings.world > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def copy_rate(settings: Settings, num_bytes: int) -> float:
    """GB/s of a copy on the device, bytes read and bytes written both counted."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / milliseconds(lambda: target.copy_(source), settings) / 1e6


class Torch:
    """Dispatch by a sort and ``index_select``, combine by ``index_select`` and a weighted sum in fp32."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by expert, and the order they were taken in."""
        order = ids_TK.flatten().argsort(stable=True)
        return x_TD.index_select(0, order // ids_TK.shape[1]), order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Tensor) -> Tensor:
        """[T, D]."""
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        slots_TKD = rows_RD.index_select(0, place).view(*weights_TK.shape, rows_RD.shape[1])
        return (slots_TKD.float() * weights_TK.unsqueeze(2)).sum(1).to(rows_RD.dtype)


class Ours:
    """One of our dispatchers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Rows by expert, and the layout."""
        sent = self.dispatcher.dispatch(x_TD, ids_TK)
        return sent.rows_RD, sent.handle

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, layout: Any) -> Tensor:
        """[T, D]."""
        return self.dispatcher.combine(rows_RD, weights_TK, layout)


def peer_to_peer(settings: Settings, tokens: int, wire_dtype: str = "same", heap: int = 0) -> Ours:
    """The dispatcher with a heap for ``tokens``, or of ``heap`` bytes."""
    heap = heap or heap_bytes(tokens * settings.top_k, settings.hidden, torch.bfloat16, blocks=3) + (1 << 20)
    options = DispatchOptions(
        wire_dtypes=WireDtypes(dispatch=wire_dtype),  # type: ignore[arg-type]
        peer_to_peer=PeerToPeerOptions(
            heap_bytes=heap,
            emulate=settings.device == "cpu",
        ),
    )
    placement = ExpertPlacement.of(settings.experts, settings.world, None)
    rank = dist.get_rank() if settings.world > 1 else 0
    return Ours(PeerToPeerDispatcher(placement, settings.group, rank, options, settings.device))


def contestants(settings: Settings, tokens: int) -> dict[str, Callable[[], Any]]:
    """Made one after another, since heaps are large."""

    def named(backend: str) -> Ours:
        return Ours(make_dispatcher(settings.experts, settings.group, backend, device=settings.device))

    others: dict[str, Callable[[], Any]] = {"torch": Torch, "local": lambda: named("local")}
    if settings.world > 1:
        others = {name: partial(named, name) for name in ("all_to_all", "all_gather")}
    return {
        **others,
        "peer_to_peer": lambda: peer_to_peer(settings, tokens),
        "peer_to_peer fp8": lambda: peer_to_peer(settings, tokens, "fp8_block"),
    }


def batch(settings: Settings, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, K different experts of each, and weights."""
    maker = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, settings.hidden, generator=maker).to(settings.device, torch.bfloat16)
    ids_TK = torch.rand(tokens, settings.experts, generator=maker).topk(settings.top_k).indices
    weights_TK = torch.rand(tokens, settings.top_k, generator=maker)
    return x_TD, ids_TK.to(settings.device), weights_TK.to(settings.device)


def check(name: str, rows_RD: Tensor, y_TD: Tensor, wanted: tuple[Tensor, Tensor], world: int) -> float:
    """Largest difference of y from the reference, which is the same for every number of ranks, since rows come back as
    they went. One rank's rows must have its bits, but for fp8.

    Raises:
        SystemExit: wrong rows, or a y that is too far away.
    """
    if world == 1 and "fp8" not in name and not torch.equal(rows_RD, wanted[0]):
        raise SystemExit(f"{name}: other rows than index_select gives")
    return difference(name, y_TD, wanted[1])


def difference(name: str, y_TD: Tensor, exact_TD: Tensor) -> float:
    """Largest difference of ``y_TD`` from the reference.

    Raises:
        SystemExit: it is above ERROR_BOUND or FP8_ERROR_BOUND.
    """
    if y_TD.shape != exact_TD.shape:
        raise SystemExit(f"{name}: y has shape {tuple(y_TD.shape)}, not {tuple(exact_TD.shape)}")
    error = float((y_TD.double() - exact_TD).abs().max())
    most = (FP8_ERROR_BOUND if "fp8" in name else ERROR_BOUND) * float(exact_TD.abs().max())
    if not error <= most:  # NaN, too
        raise SystemExit(
            f"{name}: y is {error:g} away from the reference, and {most:g} is the most for {len(y_TD)} tokens"
        )
    return error


def run_sizes(settings: Settings) -> list[dict[str, Any]]:
    """A row for each number of tokens and contestant: milliseconds, GB/s of each operation."""
    found = []
    for tokens in settings.tokens:
        x_TD, ids_TK, weights_TK = given = batch(settings, tokens)
        rate = copy_rate(settings, tokens * settings.top_k * settings.row_bytes)
        rows_RD, order = Torch().dispatch(x_TD, ids_TK)
        wanted = rows_RD, Torch().combine(rows_RD.double(), weights_TK.double(), order)
        for name, make in contestants(settings, tokens).items():
            found.append(
                {"tokens": tokens, "who": name, "copy_gb_s": rate, **run_one(make(), name, given, wanted, settings)}
            )
            if settings.device == "cuda":
                torch.cuda.empty_cache()
    return found


def run_one(
    who: Torch | Ours,
    name: str,
    given: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    settings: Settings,
) -> dict[str, Any]:
    """Of one contestant: times, rates, and how far its result is from the reference."""
    x_TD, ids_TK, weights_TK = given
    rows_RD, state = who.dispatch(x_TD, ids_TK)
    row: dict[str, Any] = {
        "max_error": check(name, rows_RD, who.combine(rows_RD, weights_TK, state), wanted, settings.world)
    }
    row["dispatch_ms"] = milliseconds(lambda: who.dispatch(x_TD, ids_TK), settings)
    row["combine_ms"] = milliseconds(lambda: who.combine(rows_RD, weights_TK, state), settings)
    row["both_ms"] = milliseconds(lambda: who.combine(*_swap(who.dispatch(x_TD, ids_TK), weights_TK)), settings)
    row["bytes"] = len(x_TD) * (1 + settings.top_k) * settings.row_bytes
    for op in ("dispatch", "combine"):
        row[f"{op}_gb_s"] = row["bytes"] / row[f"{op}_ms"] / 1e6
    return row


def _swap(sent: tuple[Tensor, Any], weights_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
    return sent[0], weights_TK, sent[1]


def low_latency(settings: Settings, tokens: int) -> dict[str, Any]:
    """The row of the low-latency operations, which only come in pairs."""
    x_TD, ids_TK, weights_TK = batch(settings, tokens)
    heap = heap_bytes(tokens * settings.experts, settings.hidden, torch.bfloat16, blocks=2) + (4 << 20)
    # The low-latency calls belong to this backend, not to the interface of all dispatchers.
    dispatcher: Any = peer_to_peer(settings, tokens, heap=heap).dispatcher

    def both(copy: bool) -> Any:
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, tokens)
        rows_LND, _ = sent.receive()
        # Timed as with experts that write their results where they are wanted.
        return dispatcher.low_latency_combine(rows_LND if copy else sent.results, weights_TK, sent)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    name = "peer_to_peer low latency"
    error = difference(name, both(copy=True), exact_TD)
    took = milliseconds(lambda: both(copy=False), settings)
    return {"tokens": tokens, "who": name, "max_error": error, "both_ms": took}


def run_few(settings: Settings) -> list[dict[str, Any]]:
    """``run_sizes`` and ``low_latency``."""
    return [*run_sizes(settings), *(low_latency(settings, tokens) for tokens in settings.tokens)]


def run_virtual(settings: Settings) -> list[dict[str, Any]]:
    """``tokens`` of all ranks together; their operations at the same time."""
    found = []
    for tokens in settings.tokens:
        for world in (2, 4, 8):
            share = -(-tokens // world)
            placement = ExpertPlacement.of(settings.experts, world, None)
            # Rows are drawn alike for all experts: twice as many as come on average are enough.
            heap = heap_bytes(2 * share * settings.top_k, settings.hidden, torch.bfloat16, blocks=3) + (1 << 20)
            peers = PeerToPeerOptions(heap_bytes=heap, emulate=settings.device == "cpu")
            ranks = virtual_ranks(placement, DispatchOptions(peer_to_peer=peers), settings.device)
            start = threading.Barrier(world)
            took = run_ranks(ranks, partial(_one_of_many, settings=settings, tokens=share, start=start))
            error, both_ms = (max(column) for column in zip(*took, strict=True))
            who = f"peer_to_peer, {world} ranks in one process"
            found.append({"tokens": tokens, "who": who, "max_error": error, "both_ms": both_ms})
            if settings.device == "cuda":
                torch.cuda.empty_cache()
    return found


def _one_of_many(
    dispatcher: Dispatcher, settings: Settings, tokens: int, start: threading.Barrier
) -> tuple[float, float]:
    """Largest error, and mean milliseconds of dispatch and combine, of one rank's thread."""
    x_TD, ids_TK, weights_TK = batch(settings, tokens)

    def both() -> Tensor:
        sent = dispatcher.dispatch(x_TD, ids_TK)
        return dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    error = float((both().double() - exact_TD).abs().max())
    for _ in range(settings.warmup):
        both()
    start.wait()
    began = time.perf_counter()
    for _ in range(settings.iterations):
        both()
    if settings.device == "cuda":
        torch.cuda.current_stream().synchronize()
    return error, (time.perf_counter() - began) * 1e3 / settings.iterations


def run_host(settings: Settings) -> list[dict[str, Any]]:
    """Microseconds that a layer's forward, and dispatch and combine alone, keep the host (until they return), and until
    the result is there."""
    found = []
    for tokens in settings.tokens:
        config = MoEConfig(settings.hidden, settings.hidden, RouterConfig(settings.experts, settings.top_k))
        layer = MoELayer.build(config).to(settings.device, torch.bfloat16)
        x_TD, ids_TK, weights_TK = batch(settings, tokens)
        heap = heap_bytes(tokens * settings.top_k, settings.hidden, torch.bfloat16, blocks=3) + (1 << 20)
        peers = PeerToPeerOptions(
            heap_bytes=heap, capacity_rows=tokens * settings.top_k, emulate=settings.device == "cpu"
        )
        placement = ExpertPlacement.of(settings.experts, 1, None)
        # Unchecked: else combine waits for the device, which is not the host's time.
        options = DispatchOptions(checked=False, peer_to_peer=peers)
        dispatcher = PeerToPeerDispatcher(placement, None, 0, options, settings.device)
        contestants = {
            "MoELayer forward": partial(layer, x_TD),
            "peer_to_peer dispatch and combine": partial(_exact, dispatcher, x_TD, ids_TK, weights_TK),
            "peer_to_peer dispatch_fixed and combine": partial(_fixed, dispatcher, x_TD, ids_TK, weights_TK),
        }
        for who, once in contestants.items():
            found.append({"tokens": tokens, "who": who, **_host_us(once, settings)})
    return found


def _host_us(once: Callable[[], Any], settings: Settings) -> dict[str, float]:
    """Medians; see ``run_host``."""
    returns, there = [], []
    with torch.no_grad():
        for i in range(settings.warmup + settings.iterations):
            start = time.perf_counter()
            once()
            returned = time.perf_counter()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            if i >= settings.warmup:
                returns.append((returned - start) * 1e6)
                there.append((time.perf_counter() - start) * 1e6)
    return {"host_us": statistics.median(returns), "total_us": statistics.median(there)}


def _exact(dispatcher: PeerToPeerDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)


def _fixed(dispatcher: PeerToPeerDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch_fixed(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_CD, weights_TK, sent.handle)


PARTS: dict[str, tuple[Callable[[Settings], list[dict[str, Any]]], dict[str, Any]]] = {
    "dispatch": (run_sizes, {"tokens": (4096, 8192), "hidden": 7168, "experts": 256, "top_k": 8}),
    "few": (run_few, {"tokens": (1, 4, 16, 64, 128, 256), "hidden": 7168, "experts": 256, "top_k": 8}),
    "virtual": (run_virtual, {"tokens": (4096,), "hidden": 7168, "experts": 256, "top_k": 8}),
    "host": (run_host, {"tokens": (64, 1024), "hidden": 512, "experts": 8, "top_k": 2}),
}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+")
    for name in ("hidden", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args(arguments)
    defaults = PARTS[given.part][1]
    chosen = {name: getattr(given, name) or value for name, value in defaults.items()}
    chosen["tokens"] = tuple(chosen["tokens"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = Settings(given.device, **chosen, warmup=given.warmup, iterations=given.iterations, world=world)
    with init_ranks(given.device) if world > 1 else nullcontext():
        found = measured(settings, given.part, chosen)
        if world > 1 and dist.get_rank():
            return
    given.json.write_text(json.dumps(found, indent=2) + "\n")
    for row in found["results"]:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})


def measured(settings: Settings, part: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """What is written to the file; the limits are measured in the same process."""
    limits = {
        "copy_gb_s": copy_rate(settings, 1 << (30 if settings.device == "cuda" else 20)),
        "gemm_tflop_s": gemm_flops(torch.bfloat16, settings.device) / 1e12,
    }
    return {
        "benchmark": f"gpu-{part}",
        "settings": {"dtype": "bfloat16", "ranks": settings.world, **chosen},
        "machine": machine.facts(settings.device),
        "limits": limits,
        "results": PARTS[part][0](settings),
    }


if __name__ == "__main__":
    main()
