"""All ranks of ``peer_to_peer`` in one process and on one device, for tests and measurements with a single GPU.

    thread 0, stream 0   rank 0   count ─▶ scan ─▶ meet ─▶ push ...    the kernels of all ranks run concurrently
    thread 1, stream 1   rank 1   count ─▶ scan ─▶ meet ─▶ push ...

On a GPU only the forward pass works: autograd has one thread per device, in which ranks would wait for each other.
Loading a kernel may wait for running kernels, which may wait for the kernel that is loaded. Set
``CUDA_MODULE_LOADING=EAGER`` to avoid this. With more than 8 ranks set ``CUDA_DEVICE_MAX_CONNECTIONS=32``, or streams
share queues.
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
from moe_comm.gpu.blocks import Blocks, single_block
from moe_comm.gpu.protocol import GroupShape, blocks_bytes
from moe_comm.topology import ExpertPlacement

T = TypeVar("T")


def virtual_ranks(
    placement: ExpertPlacement, options: DispatchOptions | None = None, device: torch.device | str = "cuda"
) -> list[PeerToPeerDispatcher]:
    """Return the dispatchers of all ranks of ``placement``. Use them with ``run_ranks``.

    Raises:
        ConfigError, MissingDependency: as ``PeerToPeerDispatcher``.
    """
    options, target_device = options or DispatchOptions(), torch.device(device)
    launcher = launcher_for(target_device, options.peer_to_peer.emulate)
    heap = options.peer_to_peer.heap_bytes or HEAP_BYTES[target_device.type]
    total = blocks_bytes(GroupShape(0, placement.offsets), heap)
    own_W = [single_block(total, target_device).own for _ in range(placement.world)]
    addresses = tuple(own.data_ptr() for own in own_W)
    if target_device.type == "cuda":
        torch.cuda.synchronize(target_device)  # the blocks must be zero before other streams use them
    return [
        PeerToPeerDispatcher(placement, None, rank, options, target_device, launcher, Blocks(own, addresses, own_W))
        for rank, own in enumerate(own_W)
    ]


def run_ranks(dispatchers: list[PeerToPeerDispatcher], work: Callable[[PeerToPeerDispatcher], T]) -> list[T]:
    """Run ``work`` for each rank, in one thread and stream per rank. Return the results by rank, after they complete.

    Raises:
        The exception of the first rank whose ``work`` raises.
    """

    def run_one(dispatcher: PeerToPeerDispatcher) -> T:
        if dispatcher.device.type != "cuda":
            return work(dispatcher)
        stream = torch.cuda.Stream(dispatcher.device)
        with torch.cuda.stream(stream):
            result = work(dispatcher)
        stream.synchronize()
        return result

    if dispatchers[0].device.type == "cuda":
        torch.cuda.synchronize(dispatchers[0].device)  # inputs from the caller's stream must be complete
    with ThreadPoolExecutor(len(dispatchers)) as threads:
        return [future.result() for future in [threads.submit(run_one, dispatcher) for dispatcher in dispatchers]]
