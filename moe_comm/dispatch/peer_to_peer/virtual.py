"""All ranks of ``peer_to_peer`` in one process and on one device: for tests and measurements with a single GPU.

    thread 0, stream 0   rank 0   count ─▶ meet ─▶ push ...        ranks meet in their kernels, as processes do
    thread 1, stream 1   rank 1   count ─▶ meet ─▶ push ...

Forward alone on a GPU: autograd has one thread a device there, in which ranks would wait for each other. Kernels that
are first loaded while others wait on the GPU may wait for these, so set ``CUDA_MODULE_LOADING=EAGER``; and with more
than 8 ranks ``CUDA_DEVICE_MAX_CONNECTIONS=32``, or streams share queues.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from moe_comm.dispatch.peer_to_peer.access import launcher_for
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.peer_to_peer.memory import HEAP_BYTES
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.gpu.blocks import together
from moe_comm.gpu.protocol import Shape, blocks_bytes
from moe_comm.topology import ExpertPlacement

T = TypeVar("T")


def virtual_ranks(
    placement: ExpertPlacement, options: DispatchOptions | None = None, device: torch.device | str = "cuda"
) -> list[PeerToPeerDispatcher]:
    """The dispatchers of every rank of ``placement``, by rank; see ``run_ranks``.

    Raises:
        ConfigError, MissingDependency: as ``PeerToPeerDispatcher``.
    """
    options, where = options or DispatchOptions(), torch.device(device)
    launcher = launcher_for(where, options.peer_to_peer.emulate)
    heap = options.peer_to_peer.heap_bytes or HEAP_BYTES[where.type]
    blocks_W = together(placement.world, blocks_bytes(Shape(0, placement.offsets), heap), where)
    if where.type == "cuda":
        torch.cuda.synchronize(where)  # zeros must stand before another stream writes to them
    return [
        PeerToPeerDispatcher(placement, None, rank, options, where, launcher, blocks)
        for rank, blocks in enumerate(blocks_W)
    ]


def run_ranks(dispatchers: list[PeerToPeerDispatcher], work: Callable[[PeerToPeerDispatcher], T]) -> list[T]:
    """``work`` of every rank, each in a thread and on a stream of its own; what it returns, by rank, once it is there.

    Raises:
        what ``work`` raises, on the first rank that does.
    """

    def one(dispatcher: PeerToPeerDispatcher) -> T:
        if dispatcher.device.type != "cuda":
            return work(dispatcher)
        stream = torch.cuda.Stream(dispatcher.device)
        with torch.cuda.stream(stream):
            found = work(dispatcher)
        stream.synchronize()
        return found

    if dispatchers[0].device.type == "cuda":
        torch.cuda.synchronize(dispatchers[0].device)  # what the caller's stream makes is there for all
    with ThreadPoolExecutor(len(dispatchers)) as threads:
        return [each.result() for each in [threads.submit(one, dispatcher) for dispatcher in dispatchers]]
