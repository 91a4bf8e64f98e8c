"""Measure the ``peer_to_peer`` backend on GPUs against plain torch and the copy rate, and write one JSON file.

    python benchmarks/gpu_bench.py dispatch --json dispatch-p2p.json
    python benchmarks/gpu_bench.py few --json few-p2p.json
    python benchmarks/gpu_bench.py virtual --json virtual-p2p.json
    python benchmarks/gpu_bench.py host --json host-p2p.json

``dispatch``: dispatch and combine of many tokens. ``few``: of 1 to 256 tokens. ``virtual``: of 2, 4 and 8 ranks in one
process with one stream each, which share the GPU and its memory bandwidth. ``host``: host time of a layer's forward,
and of dispatch and combine. One rank has all experts, so all rows stay in the memory of the GPU. Under torchrun, each
rank has its own GPU and its local experts, tokens are per rank, and the slowest rank counts.
``--device cpu`` emulates the kernels to test this script; the times are meaningless.

The lower bound is the rate of ``torch.Tensor.copy_`` in the same run. Dispatch reads T rows and writes T K rows;
combine reads T K rows and writes T rows.
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
"""Largest allowed error of y relative to its largest element, for rows in bfloat16 and for rows sent in e4m3."""


@dataclass(frozen=True)
class Settings:
    """Command line: tokens T (several values), hidden D, experts E, top-k K."""

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
        """The group of all ranks, or None for one rank."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a bfloat16 row."""
        return 2 * self.hidden


def milliseconds(work: Callable[[], Any], settings: Settings) -> float:
    """Return the median device time of ``work`` in milliseconds, on the slowest rank."""
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
    """Return the rate of a copy on the device in GB/s, counting both read and written bytes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / milliseconds(lambda: target.copy_(source), settings) / 1e6


class TorchContestant:
    """Dispatch by a sort and ``index_select``, combine by ``index_select`` and a weighted sum in fp32."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows by expert, and their order."""
        order = ids_TK.flatten().argsort(stable=True)
        return x_TD.index_select(0, order // ids_TK.shape[1]), order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Tensor) -> Tensor:
        """Return the weighted sums, [T, D]."""
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        slots_TKD = rows_RD.index_select(0, inverse).view(*weights_TK.shape, rows_RD.shape[1])
        return (slots_TKD.float() * weights_TK.unsqueeze(2)).sum(1).to(rows_RD.dtype)


class MoeCommContestant:
    """A dispatcher of this library."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Return the rows by expert, and the dispatch handle."""
        dispatched = self.dispatcher.dispatch(x_TD, ids_TK)
        return dispatched.rows_RD, dispatched.handle

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Return the weighted sums, [T, D]."""
        return self.dispatcher.combine(rows_RD, weights_TK, handle)


def peer_to_peer(settings: Settings, tokens: int, wire_dtype: str = "same", heap: int = 0) -> MoeCommContestant:
    """Return a peer-to-peer dispatcher with a heap for ``tokens``, or of ``heap`` bytes."""
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
    return MoeCommContestant(PeerToPeerDispatcher(placement, settings.group, rank, options, settings.device))


def contestants(settings: Settings, tokens: int) -> dict[str, Callable[[], Any]]:
    """Return the constructors of the contestants, which exist one at a time because heaps are large."""

    def named(backend: str) -> MoeCommContestant:
        return MoeCommContestant(
            make_dispatcher(settings.experts, settings.group, backend=backend, device=settings.device)
        )

    others: dict[str, Callable[[], Any]] = {"torch": TorchContestant, "local": lambda: named("local")}
    if settings.world > 1:
        others = {name: partial(named, name) for name in ("all_to_all", "all_gather")}
    return {
        **others,
        "peer_to_peer": lambda: peer_to_peer(settings, tokens),
        "peer_to_peer fp8": lambda: peer_to_peer(settings, tokens, "fp8_block"),
    }


def batch(settings: Settings, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, K distinct experts of each, and weights."""
    generator = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, settings.hidden, generator=generator).to(settings.device, torch.bfloat16)
    ids_TK = torch.rand(tokens, settings.experts, generator=generator).topk(settings.top_k).indices
    weights_TK = torch.rand(tokens, settings.top_k, generator=generator)
    return x_TD, ids_TK.to(settings.device), weights_TK.to(settings.device)


def check(name: str, rows_RD: Tensor, y_TD: Tensor, expected: tuple[Tensor, Tensor], world: int) -> float:
    """Return the largest difference of y from the reference, which does not depend on the number of ranks.

    On one rank, the rows must be bit-identical to the reference, except for fp8.

    Raises:
        SystemExit: the rows or y differ.
    """
    if world == 1 and "fp8" not in name and not torch.equal(rows_RD, expected[0]):
        raise SystemExit(f"{name}: the rows differ from those of index_select")
    return difference(name, y_TD, expected[1])


def difference(name: str, y_TD: Tensor, exact_TD: Tensor) -> float:
    """Return the largest difference of ``y_TD`` from the reference.

    Raises:
        SystemExit: the difference exceeds ERROR_BOUND or FP8_ERROR_BOUND.
    """
    if y_TD.shape != exact_TD.shape:
        raise SystemExit(f"{name}: y has shape {tuple(y_TD.shape)}; expected {tuple(exact_TD.shape)}")
    error = float((y_TD.double() - exact_TD).abs().max())
    limit = (FP8_ERROR_BOUND if "fp8" in name else ERROR_BOUND) * float(exact_TD.abs().max())
    if not error <= limit:  # also if NaN
        raise SystemExit(
            f"{name}: y differs from the reference by {error:g} for {len(y_TD)} tokens (allowed: {limit:g})"
        )
    return error


def run_sizes(settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each number of tokens and contestant, with milliseconds and GB/s of each operation."""
    rows = []
    for tokens in settings.tokens:
        x_TD, ids_TK, weights_TK = inputs = batch(settings, tokens)
        rate = copy_rate(settings, tokens * settings.top_k * settings.row_bytes)
        rows_RD, order = TorchContestant().dispatch(x_TD, ids_TK)
        expected = rows_RD, TorchContestant().combine(rows_RD.double(), weights_TK.double(), order)
        for name, make in contestants(settings, tokens).items():
            rows.append(
                {"tokens": tokens, "who": name, "copy_gb_s": rate, **run_one(make(), name, inputs, expected, settings)}
            )
            if settings.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def run_one(
    who: TorchContestant | MoeCommContestant,
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    settings: Settings,
) -> dict[str, Any]:
    """Return times, rates and error of one contestant."""
    x_TD, ids_TK, weights_TK = inputs
    rows_RD, state = who.dispatch(x_TD, ids_TK)
    row: dict[str, Any] = {
        "max_error": check(name, rows_RD, who.combine(rows_RD, weights_TK, state), expected, settings.world)
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
    """Return the row of the low-latency operations, which are timed as a pair."""
    x_TD, ids_TK, weights_TK = batch(settings, tokens)
    heap = heap_bytes(tokens * settings.experts, settings.hidden, torch.bfloat16, blocks=2) + (4 << 20)
    # The low-latency operations exist in this backend only.
    dispatcher: Any = peer_to_peer(settings, tokens, heap=heap).dispatcher

    def both(copy: bool) -> Any:
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, tokens)
        rows_LND, _ = sent.receive()
        # Timed without a copy, as for experts that write their outputs into the buffer of the dispatcher.
        return dispatcher.low_latency_combine(rows_LND if copy else sent.results, weights_TK, sent)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    name = "peer_to_peer low latency"
    error = difference(name, both(copy=True), exact_TD)
    took = milliseconds(lambda: both(copy=False), settings)
    return {"tokens": tokens, "who": name, "max_error": error, "both_ms": took}


def run_few(settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of ``run_sizes`` and ``low_latency``."""
    return [*run_sizes(settings), *(low_latency(settings, tokens) for tokens in settings.tokens)]


def run_virtual(settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of several ranks in one process that run concurrently. ``tokens`` are over all ranks."""
    rows = []
    for tokens in settings.tokens:
        for world in (2, 4, 8):
            share = -(-tokens // world)
            placement = ExpertPlacement.of(settings.experts, world, None)
            # Experts are drawn uniformly, so twice the mean number of rows is sufficient.
            heap = heap_bytes(2 * share * settings.top_k, settings.hidden, torch.bfloat16, blocks=3) + (1 << 20)
            peers = PeerToPeerOptions(heap_bytes=heap, emulate=settings.device == "cpu")
            ranks = virtual_ranks(placement, DispatchOptions(peer_to_peer=peers), settings.device)
            start = threading.Barrier(world)
            took = run_ranks(ranks, partial(_one_of_many, settings=settings, tokens=share, start=start))
            error, both_ms = (max(column) for column in zip(*took, strict=True))
            who = f"peer_to_peer, {world} ranks in one process"
            rows.append({"tokens": tokens, "who": who, "max_error": error, "both_ms": both_ms})
            if settings.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def _one_of_many(
    dispatcher: Dispatcher, settings: Settings, tokens: int, start: threading.Barrier
) -> tuple[float, float]:
    """Return the largest error and the mean milliseconds of dispatch and combine, for the thread of one rank."""
    x_TD, ids_TK, weights_TK = batch(settings, tokens)

    def both() -> Tensor:
        sent = dispatcher.dispatch(x_TD, ids_TK)
        return dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    error = float((both().double() - exact_TD).abs().max())
    for _ in range(settings.warmup):
        both()
    start.wait()
    started = time.perf_counter()
    for _ in range(settings.iterations):
        both()
    if settings.device == "cuda":
        torch.cuda.current_stream().synchronize()
    return error, (time.perf_counter() - started) * 1e3 / settings.iterations


def run_host(settings: Settings) -> list[dict[str, Any]]:
    """Return the microseconds until a layer's forward, and dispatch and combine, return, and until they complete."""
    rows = []
    for tokens in settings.tokens:
        config = MoEConfig(settings.hidden, settings.hidden, RouterConfig(settings.experts, settings.top_k))
        layer = MoELayer.build(config).to(settings.device, torch.bfloat16)
        x_TD, ids_TK, weights_TK = batch(settings, tokens)
        heap = heap_bytes(tokens * settings.top_k, settings.hidden, torch.bfloat16, blocks=3) + (1 << 20)
        peers = PeerToPeerOptions(
            heap_bytes=heap, capacity_rows=tokens * settings.top_k, emulate=settings.device == "cpu"
        )
        placement = ExpertPlacement.of(settings.experts, 1, None)
        # With checked=True, combine would wait for the device.
        options = DispatchOptions(checked=False, peer_to_peer=peers)
        dispatcher = PeerToPeerDispatcher(placement, None, 0, options, settings.device)
        contestants = {
            "MoELayer forward": partial(layer, x_TD),
            "peer_to_peer dispatch and combine": partial(_exact, dispatcher, x_TD, ids_TK, weights_TK),
            "peer_to_peer dispatch_fixed and combine": partial(_fixed, dispatcher, x_TD, ids_TK, weights_TK),
        }
        for who, once in contestants.items():
            rows.append({"tokens": tokens, "who": who, **_host_us(once, settings)})
    return rows


def _host_us(once: Callable[[], Any], settings: Settings) -> dict[str, float]:
    """Return the medians of ``run_host``."""
    returns, completions = [], []
    with torch.no_grad():
        for i in range(settings.warmup + settings.iterations):
            start = time.perf_counter()
            once()
            returned = time.perf_counter()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            if i >= settings.warmup:
                returns.append((returned - start) * 1e6)
                completions.append((time.perf_counter() - start) * 1e6)
    return {"host_us": statistics.median(returns), "total_us": statistics.median(completions)}


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
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+")
    for name in ("hidden", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args(arguments)
    defaults = PARTS[args.part][1]
    chosen = {name: getattr(args, name) or value for name, value in defaults.items()}
    chosen["tokens"] = tuple(chosen["tokens"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = Settings(args.device, **chosen, warmup=args.warmup, iterations=args.iterations, world=world)
    with init_ranks(args.device) if world > 1 else nullcontext():
        result = measured(settings, args.part, chosen)
        if world > 1 and dist.get_rank():
            return
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    for row in result["results"]:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})


def measured(settings: Settings, part: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object. The limits are measured in the same process."""
    limits = {
        "copy_gb_s": copy_rate(settings, 1 << (30 if settings.device == "cuda" else 20)),
        "gemm_tflop_s": gemm_flops(torch.bfloat16, settings.device) / 1e12,
    }
    return {
        "benchmark": f"gpu-{part}",
        "settings": {"dtype": "bfloat16", "ranks": settings.world, **chosen},
        "machine": machine.machine_info(settings.device),
        "limits": limits,
        "results": PARTS[part][0](settings),
    }


if __name__ == "__main__":
    main()
