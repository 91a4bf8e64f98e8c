"""The memory blocks of a group's ranks for ``peer_to_peer``, and the translation of device faults to exceptions.

Dispatchers of the same group and expert placement, such as those of a model's layers, share a block and its heap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import SAME_CALLS, Channel
from moe_comm.comm.header import Header, describe, failure
from moe_comm.comm.peers import Peers
from moe_comm.comm.shared_heap import mapped_blocks
from moe_comm.dispatch.types import PeerToPeerOptions, peers_routing_error, routing_error
from moe_comm.errors import ConfigError, HeapError, MoeCommError, PeerDied, PeerError, PeerTimeout
from moe_comm.gpu.blocks import Blocks, single_block, symmetric_blocks
from moe_comm.gpu.launch import Launcher
from moe_comm.gpu.operations import SLICE_NS, GroupOperations
from moe_comm.gpu.order import stream_order
from moe_comm.gpu.protocol import (
    ABORTED,
    ARRIVED,
    BAD_IDS_WORD,
    DONE,
    FAULT_WORD,
    NO_ROOM,
    POSTED,
    RESULTS,
    STAGED,
    TIMED_OUT,
    FaultReport,
    GroupShape,
    blocks_bytes,
)

WATCH_INTERVAL_S = 0.25
"""Interval of checks that peer processes are alive, while kernels may wait for them."""
HEAP_BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}
"""Default sizes of the heap."""

_AWAITED = {
    POSTED: "begin the operation",
    DONE: "finish reading and writing rows",
    ARRIVED: "send its rows",
    RESULTS: "compute the results of its experts",
    STAGED: "reduce its rows",
}


class PeerWatch:
    """A thread that checks peer processes while ``on``, and aborts waits of kernels when one has ended.

    The thread ends with this object, or before the interpreter does.
    """

    def __init__(self, peers: Peers, abort: Callable[[], None]) -> None:
        self.on = False
        self._peers, self._abort = peers, abort
        stop = threading.Event()
        self.thread = threading.Thread(
            target=_run_watch, args=(weakref.ref(self), stop), name="peer watch", daemon=True
        )
        self.thread.start()
        weakref.finalize(self, _stop, self.thread, stop)

    def check(self) -> None:
        """Check the peers once."""
        if self.on and self._peers.ended():
            self._abort()


def _run_watch(reference: weakref.ref[PeerWatch], stop: threading.Event) -> None:
    while not stop.wait(WATCH_INTERVAL_S) and (watch := reference()) is not None:
        watch.check()
        del watch


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():  # this thread may drop the last reference to the watch
        thread.join()


class PeerGroupMemory:
    """One rank's memory block and its state of the protocol, shared by dispatchers of a group.

    operations: state of the protocol.
    emulated: whether kernels run on the CPU. A launch then returns after the kernel has ended.
    current: the operation that has begun, whose errors ``check`` and ``raise_fault`` raise.
    failed: error after which the group is unusable. uncombined: a low-latency dispatch that has not been combined.
    """

    def __init__(self, channel: Channel | None, operations: GroupOperations) -> None:
        self.channel, self.operations = channel, operations
        self.emulated = operations.device.type == "cpu"
        self._order = stream_order(channel.comm.keep if channel is not None else None, operations.device)
        self._timeout_s = 0.0
        self._idle = self.current = Header("dispatch", 0, 0, torch.float32, 1, operations.shape.experts, False)
        self.failed: PeerError | None = None
        self.uncombined = ""
        self._watch: PeerWatch | None = None
        if channel is not None and channel.comm.peers is not None:
            self._watch = PeerWatch(channel.comm.peers, operations.abort)

    @property
    def rank(self) -> int:
        return self.operations.shape.rank

    def begin(self, operation: Header, timeout_s: float) -> None:
        """Prepare ``operation``, whose kernels wait for at most ``timeout_s``. Call it before its first kernel."""
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)
        if self.uncombined:
            raise ConfigError(
                f"rank {self.rank} begins {describe(operation)} between {self.uncombined} and its low_latency_combine; "
                "call low_latency_combine first, because the dispatch and its combine are one turn of the protocol"
            )
        self.current = operation
        if self.operations.plan.failed():
            # An unchecked operation failed. The progress of other ranks is unknown.
            error = self._mark_unusable(self.error_of(self.operations.report, None))
            self.end()
            raise error
        self._timeout_s = timeout_s
        if not self.emulated:
            self._order.enter()
        if self._watch is not None:
            self._watch.on = True
        self.operations.begin(timeout_s)

    def join(self) -> None:
        """Let the next operation wait for the current stream, which runs kernels that use the last operation."""
        self._order.join()

    def end(self) -> None:
        """Finish an operation, after its last kernel is queued or after an error."""
        self.current = self._idle
        if self._watch is not None and self.emulated:
            self._watch.on = False

    def check(self, ids_TK: Tensor | None = None) -> None:
        """Wait for the last handshake (exchange of headers), and raise its fault or that of a kernel after it."""
        plan = self.operations.plan
        if plan.wait(plan.turn, SLICE_NS) and not plan.failed():  # usually the turn completes in this time
            return
        try:
            self.operations.wait()
        except PeerTimeout as error:
            self.failed = error
            raise
        self.raise_fault(ids_TK)

    def raise_fault(self, ids_TK: Tensor | None = None) -> None:
        """Raise the fault that the device has reported, if any; see ``check``."""
        if not self.operations.failed:
            return
        report = self.operations.report
        late = report.turn < self.operations.turn  # the fault of an earlier, unchecked operation; see ``begin``
        error = self.error_of(report, None if late else ids_TK)
        try:
            if late or isinstance(error, PeerError):
                raise self._mark_unusable(error)
            self.operations.reset_fault()
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the caller's rows in the heap

    def _mark_unusable(self, error: Exception) -> PeerError:
        """Record and return the error that makes the group unusable."""
        self.failed = error if isinstance(error, PeerError) else PeerError(f"an earlier operation failed: {error}")
        return self.failed

    def error_of(self, report: FaultReport, ids_TK: Tensor | None) -> Exception:
        """Return the exception for ``report``."""
        if report.fault in (TIMED_OUT, ABORTED):
            return self._lost_peer(report)
        if report.fault == NO_ROOM:
            return HeapError(
                f"rank {report.who} has no room for its rows in {describe(self.current)}; increase "
                "PeerToPeerOptions.heap_bytes, and capacity_rows if it is set, on every rank"
            )
        headers, experts = self.operations.headers, self.current.num_experts
        for words in headers:
            if not words[FAULT_WORD]:
                words[-1] = 0  # the last word is not text: see FREE_BYTES_WORD of primitives.py
        for rank, words in enumerate(headers):
            if self.current.fault is None and words[FAULT_WORD] == BAD_IDS_WORD:
                if rank == self.rank and ids_TK is not None:
                    return routing_error(ids_TK, experts)
                first, value, bad = (int(word) for word in words[FAULT_WORD + 1 : FAULT_WORD + 4])
                return peers_routing_error(rank, bad, first, value, self.current.top_k, experts)
        return failure([words.tobytes() for words in headers], self.rank, self.current)

    def _lost_peer(self, report: FaultReport) -> PeerError:
        peers = None if self.channel is None else self.channel.comm.peers
        dead = [] if peers is None else peers.ended()
        if peers is not None and dead:
            who = ", ".join(peers.describe(rank) for rank in dead)
            return PeerDied(
                f"rank {self.rank} in {describe(self.current)}: lost {who}. Restart the ranks; this group is "
                f"unusable. {SAME_CALLS}."
            )
        who = f"rank {report.who}" if peers is None else peers.describe(report.who)
        return PeerTimeout(
            f"rank {self.rank} in {describe(self.current)}: waited {self._timeout_s:g} s for {who} to "
            f"{_AWAITED.get(report.what, 'send its rows')}; its flag is {report.value}, expected {report.expected}. "
            "The rank hangs, is slow, or took another path through the program; see its stacks (py-spy dump), or "
            f"increase DispatchOptions.timeout_s. This group is unusable. {SAME_CALLS}."
        )


def shared_peer_memory(
    channel: Channel | None,
    group: ProcessGroup | None,
    rank: int,
    offsets: Sequence[int],
    device: torch.device,
    options: PeerToPeerOptions,
    launcher: Launcher,
) -> PeerGroupMemory:
    """Return the memory of ``group`` for experts placed at ``offsets``. The first call creates it and is collective.

    Args:
        channel: of the group, whose ranks have compared ``options``; None without peers.
    """
    total = options.heap_bytes or HEAP_BYTES[device.type]

    def make() -> PeerGroupMemory:
        shape = GroupShape(rank, tuple(offsets))
        blocks = shared_blocks(channel, group, device, blocks_bytes(shape, total))
        memory = PeerGroupMemory(channel, GroupOperations(shape, blocks, launcher))
        if channel is not None:
            ready = torch.zeros(1, dtype=torch.int64, device="cpu").to(channel.control_device)
            channel.all_gather(ready, "the start of shared blocks")
        return memory

    if channel is None:
        return make()
    # Keep it even after a failure: other ranks may not know of the failure, and would not create another one.
    return channel.comm.keep(("peer memory", device, tuple(offsets), total), make)


def shared_blocks(channel: Channel | None, group: ProcessGroup | None, device: torch.device, total: int) -> Blocks:
    """Return blocks of ``total`` bytes that all ranks map, with zeros. Collective; a HeapError is raised on every rank.

    Peers may access them after a later operation.
    """
    if channel is None or group is None or channel.comm.world == 1:
        return single_block(total, device)
    if device.type == "cuda":
        outcome: str | HeapError = ""
        try:
            blocks = symmetric_blocks(group, device, total)
        except (MoeCommError, RuntimeError) as error:
            outcome = HeapError(f"symmetric memory of {total} bytes: {error}")
        agree(outcome, partial(gather_texts, channel, "sharing blocks"))
        return blocks
    return mapped_blocks(channel, total, "blocks for peer_to_peer")
