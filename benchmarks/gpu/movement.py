"""Dispatch and combine of ``peer_to_peer`` against plain torch, NCCL and the copy rate.

    python -m benchmarks.gpu.movement dispatch --results results.jsonl
    torchrun --nproc-per-node 8 -m benchmarks.gpu.movement dispatch --results results.jsonl

``dispatch``: many tokens. ``nccl``: the same over NCCL. ``few``: 1 to 256 tokens, also by the low-latency operations.
``virtual``: 2, 4 and 8 ranks in one process with one stream each, which share the GPU and its memory bandwidth.
``host``: host time of a layer's forward and of dispatch and combine. One rank has all experts, so all rows stay in the
memory of the GPU. Under torchrun, each rank has its own GPU and its local experts, tokens are per rank, and the slowest
rank counts. ``--device cpu`` emulates the kernels to test this script; its times mean nothing.

Bytes: dispatch reads T rows and writes T K rows in the wire dtype; combine reads T K rows and writes T rows.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.gpu.record import Recorder, Work
from benchmarks.gpu.timing import Timer, copy_gb_s, random
from moe_comm.dispatch import DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.peer_to_peer.virtual import run_ranks, virtual_ranks
from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.gpu.heap import heap_bytes
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement

ERROR_BOUND, FP8_ERROR_BOUND = 2e-2, 8e-2
"""Largest allowed error of y relative to its largest element, for rows in bfloat16 and for rows sent in e4m3."""
TIMEOUT_S = 10.0
"""Limit of one operation of ``peer_to_peer``: far below the limit of a part, so that a hang is named."""


@dataclass(frozen=True)
class Case:
    """A batch shape: tokens T, hidden D, experts E, top-k K, and how it is timed."""

    timer: Timer
    tokens: int
    hidden: int
    experts: int
    top_k: int

    @property
    def device(self) -> str:
        return self.timer.device

    @property
    def world(self) -> int:
        return self.timer.world

    @property
    def group(self) -> ProcessGroup | None:
        """The group of all ranks, or None for one rank."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a bfloat16 row."""
        return 2 * self.hidden

    def moved_bytes(self, wire_dtype: str = "same") -> int:
        """Return the bytes that a dispatch reads and writes; with ``same`` also those of a combine."""
        sent = bytes_per_row(self.hidden, wire_dtypes(wire_dtype).of("dispatch"), torch.bfloat16)
        return self.tokens * self.row_bytes + self.tokens * self.top_k * sent

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, K distinct experts of each, and weights, made on the device."""
        x_TD = random(self.device, self.tokens, self.hidden, seed=self.tokens)
        maker = torch.Generator(self.device).manual_seed(self.tokens)
        scores_TE = torch.rand(self.tokens, self.experts, generator=maker, device=self.device)
        weights_TK = torch.rand(self.tokens, self.top_k, generator=maker, device=self.device)
        return x_TD, scores_TE.topk(self.top_k).indices, weights_TK

    def describe(self) -> dict[str, Any]:
        """Return the values that identify the case in a result."""
        return {name: getattr(self, name) for name in ("tokens", "hidden", "experts", "top_k", "world")}


def wire_dtypes(dispatch: str) -> WireDtypes:
    """Return the wire dtypes with this one in dispatch."""
    return WireDtypes(dispatch=dispatch)  # type: ignore[arg-type]


class TorchContestant:
    """Dispatch by a sort and ``index_select``, combine by ``index_select`` and a weighted sum in fp32."""

    wire_dtype = "same"

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Return the rows by expert, and their order."""
        order = ids_TK.flatten().argsort(stable=True)
        return x_TD.index_select(0, order // ids_TK.shape[1]), order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Any) -> Tensor:
        """Return the weighted sums, [T, D]."""
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        slots_TKD = rows_RD.index_select(0, inverse).view(*weights_TK.shape, rows_RD.shape[1])
        return (slots_TKD.float() * weights_TK.unsqueeze(2)).sum(1).to(rows_RD.dtype)


class NcclContestant(TorchContestant):
    """``TorchContestant`` with an ``all_to_all_single`` in each direction, for one rank.

    The receive buffers are registered with NCCL where torch and NCCL support it, which saves NCCL's staging copies.
    """

    def __init__(self, case: Case) -> None:
        backend = "nccl" if case.device == "cuda" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.registered, shape = False, (case.tokens * case.top_k, case.hidden)
        self._pool: Any = None
        if case.device == "cuda":
            try:
                nccl: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
                dist.barrier()  # creates the communicator
                self._pool = torch.cuda.MemPool(nccl.mem_allocator)
                with torch.cuda.use_mem_pool(self._pool):
                    self.buffers = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
                nccl.register_mem_pool(self._pool)
                self.registered = True
            except (AttributeError, RuntimeError, TypeError) as error:
                print(f"NCCL buffers are not registered: {error}", flush=True)
        if not self.registered:
            self.buffers = [torch.empty(shape, dtype=torch.bfloat16, device=case.device) for _ in range(2)]

    def close(self) -> None:
        """Destroy the process group, so that the process does not wait for NCCL when it exits."""
        self.buffers.clear()
        self._pool = None
        dist.destroy_process_group()

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        rows_RD, order = super().dispatch(x_TD, ids_TK)
        dist.all_to_all_single(self.buffers[0], rows_RD)
        return self.buffers[0], order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Any) -> Tensor:
        dist.all_to_all_single(self.buffers[1], rows_RD)
        return super().combine(self.buffers[1], weights_TK, order)


class DispatcherContestant:
    """A dispatcher of this library."""

    def __init__(self, dispatcher: Any, wire_dtype: str = "same") -> None:
        self.dispatcher, self.wire_dtype = dispatcher, wire_dtype

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Return the rows by expert, and the dispatch handle."""
        sent = self.dispatcher.dispatch(x_TD, ids_TK)
        return sent.rows_RD, sent.handle

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Return the weighted sums, [T, D]."""
        return self.dispatcher.combine(rows_RD, weights_TK, handle)  # type: ignore[no-any-return]


Contestant = TorchContestant | DispatcherContestant


def peer_to_peer(
    case: Case, wire_dtype: str = "same", heap: int = 0, *, capacity_rows: int | None = None, checked: bool = True
) -> PeerToPeerDispatcher:
    """Return a peer-to-peer dispatcher with a heap for ``case``, or of ``heap`` bytes."""
    rows = case.tokens * case.top_k
    options = DispatchOptions(
        wire_dtypes=wire_dtypes(wire_dtype),
        timeout_s=TIMEOUT_S,
        checked=checked,
        peer_to_peer=PeerToPeerOptions(
            heap_bytes=heap or heap_bytes(rows, case.hidden, torch.bfloat16, blocks=3) + (1 << 20),
            capacity_rows=capacity_rows,
            emulate=case.device == "cpu",
        ),
    )
    rank = dist.get_rank() if case.world > 1 else 0
    placement = ExpertPlacement.of(case.experts, case.world, None)
    return PeerToPeerDispatcher(placement, case.group, rank, options, case.device)


def contestants(case: Case) -> dict[str, Callable[[], Contestant]]:
    """Return the constructors of the contestants, which exist one at a time because heaps are large."""

    def named(backend: str) -> DispatcherContestant:
        return DispatcherContestant(make_dispatcher(case.experts, case.group, backend=backend, device=case.device))

    if case.world > 1:  # over NCCL
        others: dict[str, Callable[[], Contestant]] = {
            name: partial(named, name) for name in ("all_to_all", "all_gather")
        }
    else:
        others = {"torch index_select": TorchContestant, "local": lambda: named("local")}
    return {
        "peer_to_peer": lambda: DispatcherContestant(peer_to_peer(case)),
        "peer_to_peer fp8": lambda: DispatcherContestant(peer_to_peer(case, "fp8_block"), "fp8_block"),
        **others,
    }


def difference(name: str, y_TD: Tensor, exact_TD: Tensor) -> float:
    """Return the largest difference of ``y_TD`` from the reference.

    Raises:
        AssertionError: the difference exceeds ERROR_BOUND or FP8_ERROR_BOUND.
    """
    if y_TD.shape != exact_TD.shape:
        raise AssertionError(f"{name}: y has shape {tuple(y_TD.shape)}; expected {tuple(exact_TD.shape)}")
    error = float((y_TD.double() - exact_TD).abs().max())
    limit = (FP8_ERROR_BOUND if "fp8" in name else ERROR_BOUND) * float(exact_TD.abs().max())
    if not error <= limit:  # also if NaN
        raise AssertionError(
            f"{name}: y differs from the reference by {error:g} for {len(y_TD)} tokens (allowed: {limit:g})"
        )
    return error


def check(name: str, rows_RD: Tensor, y_TD: Tensor, expected: tuple[Tensor, Tensor], world: int) -> float:
    """Return the largest difference of y from the reference, which does not depend on the number of ranks.

    On one rank, the rows must be bit-identical to the reference, except for fp8.

    Raises:
        AssertionError: the rows or y differ.
    """
    if world == 1 and "fp8" not in name and not torch.equal(rows_RD, expected[0]):
        raise AssertionError(f"{name}: the rows differ from those of index_select")
    return difference(name, y_TD, expected[1])


def measure_contestant(case: Case, name: str, make: Callable[[], Contestant]) -> Iterator[dict[str, Any]]:
    """Yield rows with the times and rates of dispatch, of combine and of both."""
    x_TD, ids_TK, weights_TK = case.inputs()
    expected_RD, order = TorchContestant().dispatch(x_TD, ids_TK)
    y_TD = TorchContestant().combine(expected_RD.double(), weights_TK.double(), order)
    who = make()
    rows_RD, state = who.dispatch(x_TD, ids_TK)
    error = check(name, rows_RD, who.combine(rows_RD, weights_TK, state), (expected_RD, y_TD), case.world)
    del expected_RD, y_TD
    copy = copy_gb_s(case.timer, case.tokens * case.top_k * case.row_bytes)

    def both() -> Tensor:
        rows_RD, state = who.dispatch(x_TD, ids_TK)
        return who.combine(rows_RD, weights_TK, state)

    operations: dict[str, tuple[Callable[[], Any], int]] = {
        "dispatch": (lambda: who.dispatch(x_TD, ids_TK), case.moved_bytes(who.wire_dtype)),
        "combine": (lambda: who.combine(rows_RD, weights_TK, state), case.moved_bytes()),
        "both": (both, case.moved_bytes(who.wire_dtype) + case.moved_bytes()),
    }
    common = {**case.describe(), "who": name, "max_error": error, "copy_gb_s": copy}
    if isinstance(who, NcclContestant):
        common["registered"] = who.registered
    for operation, (work, num_bytes) in operations.items():
        times = case.timer.measure(work, kernels=operation != "both")
        rate = num_bytes / times["device_us"] / 1e3
        yield {**common, "what": operation, "bytes": num_bytes, "gb_s": rate, "of_copy": rate / copy, **times}
    if isinstance(who, NcclContestant):
        who.close()


def measure_fixed(case: Case) -> dict[str, Any]:
    """Return the row of ``dispatch_fixed`` and combine, which a CUDA graph can capture."""
    x_TD, ids_TK, weights_TK = case.inputs()
    dispatcher = peer_to_peer(case, capacity_rows=case.tokens * case.top_k, checked=False)
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
        # Timed without a copy, as for experts that write their outputs into the buffer of the dispatcher.
        return dispatcher.low_latency_combine(rows_LND if copy else sent.results, weights_TK, sent)

    exact_TD = x_TD.double() * weights_TK.double().sum(1, keepdim=True)
    name = "peer_to_peer low latency"
    error = difference(name, both(copy=True), exact_TD)
    times = case.timer.measure(both) | case.timer.graph(both)
    dispatcher.check()
    return {**case.describe(), "who": name, "what": "both", "max_error": error, **times}


def measure_virtual(case: Case, world: int) -> dict[str, Any]:
    """Return the row of ``world`` ranks in one process that run concurrently. The tokens of ``case`` are over all."""
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
        # An allocation of CUDA may wait for running kernels, which may wait for this rank. The allocator of torch
        # serves both calls below from what is allocated and freed here.
        spare = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(16)]
        spare += [torch.empty(4 * case.tokens * case.row_bytes, dtype=torch.uint8, device="cuda") for _ in range(4)]
        del spare
        torch.cuda.current_stream().synchronize()

    def both() -> Tensor:
        sent = dispatcher.dispatch(x_TD, ids_TK)
        return dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)

    start.wait()
    error = difference(f"rank {dispatcher.rank} of several in one process", both(), exact_TD)
    for _ in range(case.timer.warmup):
        both()
    start.wait()
    # Each call waits for the counts on the host, so wall time is the time of the device.
    us = replace(case.timer, device="cpu", warmup=0).measure(both)["device_us"]
    start.wait()
    return error, us


def measure_host(case: Case) -> Iterator[tuple[str, Work]]:
    """Yield the operations of ``host``: the layer's forward, and dispatch and combine, without checks that wait."""
    x_TD, ids_TK, weights_TK = case.inputs()

    def layer() -> Callable[[], Any]:
        config = MoEConfig(case.hidden, case.hidden, RouterConfig(case.experts, case.top_k))
        return partial(MoELayer.build(config).to(case.device, torch.bfloat16), x_TD)

    def moves(call: Callable[..., Tensor]) -> Callable[[], Any]:
        dispatcher = peer_to_peer(case, capacity_rows=case.tokens * case.top_k, checked=False)
        return partial(call, dispatcher, x_TD, ids_TK, weights_TK)

    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "MoELayer forward": layer,
        "peer_to_peer dispatch and combine": lambda: moves(_exact),
        "peer_to_peer dispatch_fixed and combine": lambda: moves(_fixed),
    }

    def measured(who: str, make: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
        with torch.no_grad():
            return {**case.describe(), "who": who, "what": "forward", **case.timer.measure(make())}

    for who, make in makers.items():
        yield f"host, {case.tokens} tokens, {who}", partial(measured, who, make)


def _exact(dispatcher: PeerToPeerDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)


def _fixed(dispatcher: PeerToPeerDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    sent = dispatcher.dispatch_fixed(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_CD, weights_TK, sent.handle)


DEEPSEEK = {"hidden": 7168, "experts": 256, "top_k": 8}
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "dispatch": ((4096, 8192), DEEPSEEK),
    "nccl": ((4096, 8192), DEEPSEEK),
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
        elif part == "virtual":
            for world in (2, 4, 8):
                yield f"{size}, {world} ranks", partial(measure_virtual, case, world)
        elif part == "host":
            yield from measure_host(case)
        else:
            for name, make in contestants(case).items():
                yield f"{size}, {name}", partial(measure_contestant, case, name, make)
            yield f"{size}, dispatch_fixed", partial(measure_fixed, case)
            if part == "few":
                yield f"{size}, low latency", partial(measure_low_latency, case)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=SHAPES)
    parser.add_argument("--results", type=Path, help="file to which lines of JSON are appended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+")
    for name in ("hidden", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of one operation")
    parser.add_argument("--only", default="", help="operations whose name begins so")
    args = parser.parse_args(arguments)
    tokens, shape = SHAPES[args.part]
    shape = {name: getattr(args, name) or value for name, value in shape.items()}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.device == "cuda":
        torch.zeros(1, device="cuda")  # loading CUDA must not count as part of the first operation
    timer = Timer(args.device, args.warmup, args.iterations, world)
    with init_ranks(args.device) if world > 1 else nullcontext():
        rank = dist.get_rank() if world > 1 else 0
        recorder = Recorder(args.part, args.results, args.device, args.limit, rank, args.only)
        cases = [Case(timer, count, **shape) for count in args.tokens or tokens]
        return recorder.run_all(operations(args.part, cases))


if __name__ == "__main__":
    raise SystemExit(main())
