"""Measure dispatch and combine of ``peer_to_peer``, and compare them with torch, NCCL and the copy rate.

    python -m benchmarks.gpu.movement dispatch --results results.jsonl
    torchrun --nproc-per-node 8 -m benchmarks.gpu.movement dispatch --results results.jsonl

``dispatch``: many tokens. ``nccl``: the same over NCCL. ``few``: 1 to 256 tokens, also by the low-latency operations.
``virtual``: 2, 4 and 8 ranks in one process with one stream each, which share the GPU and its memory bandwidth.
``host``: host time of a layer's forward and of dispatch and combine. One rank has all experts, so all rows stay in the
memory of the GPU. Under torchrun, each rank has its own GPU and its local experts, tokens are per rank, and times are
those of the slowest rank. ``--device cpu`` emulates the kernels to test this script; its times mean nothing.

Bytes: dispatch reads T rows and writes T K rows in the wire dtype; combine reads T K rows and writes T rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.dispatchers import (
    TIMEOUT_S,
    Case,
    Contestant,
    DispatcherContestant,
    NcclContestant,
    bulk_copies,
    check,
    contestants,
    difference,
    dispatch_and_combine,
    peer_to_peer,
    reference,
)
from benchmarks.gpu.record import Recorder, Work, part_parser
from benchmarks.gpu.timing import Timer, copy_gb_s
from benchmarks.gpu.virtual import run_ranks, virtual_ranks
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.gpu.heap import heap_bytes
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement


def measure_contestant(case: Case, name: str, make: Callable[[], Contestant]) -> Iterator[dict[str, Any]]:
    """Yield rows with the times and rates of dispatch, of combine and of both."""
    who = make()
    try:
        yield from _contestant_rows(case, name, who)
    finally:
        if isinstance(who, NcclContestant):
            who.close()


def _contestant_rows(case: Case, name: str, who: Contestant) -> Iterator[dict[str, Any]]:
    inputs = x_TD, ids_TK, weights_TK = case.inputs()
    rows_RD, state = who.dispatch(x_TD, ids_TK)
    error = check(name, rows_RD, who.combine(rows_RD, weights_TK, state), reference(*inputs), case.world)
    copy = copy_gb_s(case.timer, case.tokens * case.top_k * case.row_bytes)
    operations: dict[str, tuple[Callable[[], Any], int]] = {
        "dispatch": (lambda: who.dispatch(x_TD, ids_TK), case.moved_bytes(who.wire_dtype)),
        "combine": (lambda: who.combine(rows_RD, weights_TK, state), case.moved_bytes()),
        "both": (partial(dispatch_and_combine, who, *inputs), case.moved_bytes(who.wire_dtype) + case.moved_bytes()),
    }
    if isinstance(who, DispatcherContestant) and who.wire_dtype != "same":  # values and scales, not decoded
        scaled = partial(who.dispatcher.dispatch, x_TD, ids_TK, scaled=True)
        operations["dispatch, scaled"] = scaled, case.moved_bytes(who.wire_dtype)
    common = {**case.describe(), "who": name, "max_error": error, "copy_gb_s": copy}
    if isinstance(who, NcclContestant):
        common["registered"] = who.registered
    for operation, (work, num_bytes) in operations.items():
        times = case.timer.measure(work, kernels=operation != "both")
        rate = num_bytes / times["device_us"] / 1e3
        yield {**common, "what": operation, "bytes": num_bytes, "gb_s": rate, "of_copy": rate / copy, **times}


def measure_fixed(case: Case) -> dict[str, Any]:
    """Return the row of ``dispatch_fixed`` and combine, which a CUDA graph can capture."""
    x_TD, ids_TK, weights_TK = case.inputs()
    dispatcher = peer_to_peer(case, fixed=True, checked=False)
    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    both = partial(_fixed, dispatcher, x_TD, ids_TK, weights_TK)
    error = difference("peer_to_peer dispatch_fixed", both(), exact_TD)
    dispatcher.check()
    times = case.timer.measure(both) | case.timer.graph(both)
    dispatcher.check()
    num_bytes = 2 * case.moved_bytes()
    rate = num_bytes / times.get("graph_us", times["device_us"]) / 1e3
    copy = copy_gb_s(case.timer, case.tokens * case.top_k * case.row_bytes)
    found = {"who": "peer_to_peer dispatch_fixed", "what": "both", "max_error": error, "copy_gb_s": copy}
    return {**case.describe(), **found, "bytes": num_bytes, "gb_s": rate, "of_copy": rate / copy, **times}


def measure_low_latency(case: Case) -> dict[str, Any]:
    """Return the row of the low-latency operations, which are timed as a pair, also inside a CUDA graph."""
    x_TD, ids_TK, weights_TK = case.inputs()
    heap = heap_bytes(case.tokens * case.experts, case.hidden, torch.bfloat16, blocks=2) + (4 << 20)
    dispatcher = peer_to_peer(case, heap=heap, checked=False)

    def both(copy: bool = False) -> Any:
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, case.tokens)
        rows_LND, _ = sent.receive()
        # The timed call does not copy: experts can write their outputs directly into the dispatcher's buffer.
        return dispatcher.low_latency_combine(rows_LND if copy else sent.results, weights_TK, sent)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    name = "peer_to_peer low latency"
    error = difference(name, both(copy=True), exact_TD)
    times = case.timer.measure(both) | case.timer.graph(both)
    dispatcher.check()
    return {**case.describe(), "who": name, "what": "both", "max_error": error, **times}


def measure_virtual(case: Case, world: int) -> dict[str, Any]:
    """Return the row of ``world`` ranks in one process that run concurrently and share the tokens of ``case``."""
    share = replace(case, tokens=-(-case.tokens // world))
    placement = ExpertPlacement.of(case.experts, world, None)
    # Experts are drawn uniformly, so twice the mean number of rows is sufficient.
    heap = heap_bytes(2 * share.tokens * case.top_k, case.hidden, torch.bfloat16, blocks=3) + (1 << 20)
    peers = PeerToPeerOptions(heap_bytes=heap, emulate=case.device == "cpu")
    ranks = virtual_ranks(placement, DispatchOptions(peer_to_peer=peers, timeout_s=TIMEOUT_S), case.device)
    start = threading.Barrier(world, timeout=4 * TIMEOUT_S)
    found = run_ranks(ranks, partial(_virtual_rank, case=share, start=start))
    error, device_us = (max(column) for column in zip(*found, strict=True))
    name = f"peer_to_peer, {world} ranks in one process"
    return {**case.describe(), "who": name, "what": "both", "max_error": error, "device_us": device_us}


def _virtual_rank(dispatcher: PeerToPeerDispatcher, case: Case, start: threading.Barrier) -> tuple[float, float]:
    """Return the largest error and the mean microseconds of dispatch and combine, for the thread of one rank."""
    x_TD, ids_TK, weights_TK = case.inputs()
    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    if case.device == "cuda":
        # cudaMalloc may wait for running kernels, and these kernels may wait for this rank. The memory that is freed
        # here stays in the cache of torch's allocator, so the calls below do not need cudaMalloc.
        spare = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(16)]
        spare += [torch.empty(4 * case.tokens * case.row_bytes, dtype=torch.uint8, device="cuda") for _ in range(4)]
        del spare
        torch.cuda.current_stream().synchronize()
    both = partial(dispatch_and_combine, DispatcherContestant(dispatcher), x_TD, ids_TK, weights_TK)
    start.wait()
    error = difference(f"rank {dispatcher.rank} of several in one process", both(), exact_TD)
    for _ in range(case.timer.warmup):
        both()
    start.wait()
    # Each call waits for the counts on the host, so wall time is the time of the device.
    us = replace(case.timer, device="cpu", warmup=0).measure(both)["device_us"]
    start.wait()
    return error, us


def host_operations(case: Case) -> Iterator[tuple[str, Work]]:
    """Yield the operations of ``host``: the layer's forward, and dispatch and combine, without checks that wait."""

    def layer(x_TD: Tensor, *_: Tensor) -> Callable[[], Any]:
        config = MoEConfig(case.hidden, case.hidden, RouterConfig(case.experts, case.top_k))
        return partial(MoELayer.build(config).to(case.device, torch.bfloat16), x_TD)

    def dispatcher() -> PeerToPeerDispatcher:
        return peer_to_peer(case, fixed=True, checked=False)

    makers: dict[str, Callable[..., Callable[[], Any]]] = {
        "MoELayer forward": layer,
        "peer_to_peer dispatch and combine": lambda *inputs: partial(
            dispatch_and_combine, DispatcherContestant(dispatcher()), *inputs
        ),
        "peer_to_peer dispatch_fixed and combine": lambda *inputs: partial(_fixed, dispatcher(), *inputs),
    }

    def measured(who: str, make: Callable[..., Callable[[], Any]]) -> dict[str, Any]:
        with torch.no_grad():
            times = case.timer.measure(make(*case.inputs()))
        return {**case.describe(), "who": who, "what": "forward", **times}

    for who, make in makers.items():
        yield f"host, {case.tokens} tokens, {who}", partial(measured, who, make)


def _fixed(dispatcher: PeerToPeerDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch_fixed(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_CD, weights_TK, sent.handle)


DEEPSEEK = {"hidden": 7168, "experts": 256, "top_k": 8}
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "dispatch": ((4096, 8192), DEEPSEEK),
    "nccl": ((4096, 8192), DEEPSEEK),
    "bulk": ((4096, 8192), DEEPSEEK),
    "few": ((1, 4, 16, 64, 128, 256), DEEPSEEK),
    "virtual": ((4096,), DEEPSEEK),
    "host": ((64, 1024), {"hidden": 512, "experts": 8, "top_k": 2}),
}


def operations(part: str, cases: list[Case]) -> Iterator[tuple[str, Work]]:
    """Yield the names and functions of the operations of a part."""
    for case in cases:
        size = f"{part}, {case.tokens} tokens"
        if part == "nccl":
            name = "NCCL all_to_all_single"
            yield f"{size}, {name}", partial(measure_contestant, case, name, partial(NcclContestant, case))
        elif part == "bulk":
            for blocks in (None, 8, 16, 24):
                name = "peer_to_peer, bulk copies" + (f", {blocks} blocks" if blocks else "")
                limited = partial(bulk_copies, case, blocks)
                yield f"{size}, {name}", partial(measure_contestant, case, name, limited)
        elif part == "virtual":
            for world in (2, 4, 8):
                yield f"{size}, {world} ranks", partial(measure_virtual, case, world)
        elif part == "host":
            yield from host_operations(case)
        else:
            for name, make in contestants(case).items():
                yield f"{size}, {name}", partial(measure_contestant, case, name, make)
            yield f"{size}, dispatch_fixed", partial(measure_fixed, case)
            if part == "few":
                yield f"{size}, low latency", partial(measure_low_latency, case)


def main() -> int:
    """Run the command. Return its exit code."""
    parser = part_parser(__doc__, limit_s=30.0)
    parser.add_argument("part", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+")
    for name in ("hidden", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--only", default="", help="prefix of the names of the operations to run")
    args = parser.parse_args()
    tokens, shape = SHAPES[args.part]
    shape = {name: getattr(args, name) or value for name, value in shape.items()}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.part == "nccl" and world > 1:
        parser.error("nccl measures one rank; run dispatch, which measures all_to_all over NCCL")
    timer = Timer(args.device, args.warmup, args.iterations, world)
    with init_ranks(args.device) if world > 1 else nullcontext():
        if args.device == "cuda":
            # CUDA starts here, outside the timed operations, and after init_ranks has selected the GPU of this rank.
            torch.zeros(1, device="cuda")
        rank = dist.get_rank() if world > 1 else 0
        recorder = Recorder(args.part, args.results, args.device, args.limit, rank, args.only)
        cases = [Case(timer, count, **shape) for count in args.tokens or tokens]
        return recorder.run_all(operations(args.part, cases))


if __name__ == "__main__":
    raise SystemExit(main())
