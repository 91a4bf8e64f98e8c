"""The blocks of a group's ranks for ``peer_to_peer``: made once for each placement of experts, and what goes wrong in
them turned into our errors.

Dispatchers of one group and placement, such as those of a model's layers, share a block and its heap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.header import Header, describe, failure
from moe_comm.comm.peers import Peers
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.types import peers_routing_error, routing_error
from moe_comm.errors import ConfigError, HeapError, MoeCommError, PeerDied, PeerError, PeerTimeout
from moe_comm.gpu.blocks import Blocks, alone, mapped, symmetric
from moe_comm.gpu.launch import Launcher
from moe_comm.gpu.protocol import (
    ABORTED,
    ARRIVED,
    BAD_IDS_WORD,
    DONE,
    FAULT_WORD,
    NO_ROOM,
    TIMED_OUT,
    TOLD,
    Report,
    Shape,
    blocks_bytes,
)
from moe_comm.gpu.turns import Turns
from moe_comm.runtime.host import host_word

LOOK_S = 0.25
"""How often a rank looks whether its peers live while kernels may wait for them."""
HEAP_BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}
"""Where the options do not say."""

_DOING = {
    TOLD: "begin the operation",
    DONE: "have read and written what it must",
    ARRIVED: "send its rows",
}


class Watch:
    """Looks at the ranks' processes while it is on, from a thread of its own, and aborts waits for one that ended.

    The thread ends with this object, or before the interpreter does.
    """

    def __init__(self, peers: Peers, abort: Callable[[], None]) -> None:
        self.on = False
        self._peers, self._abort = peers, abort
        stop = threading.Event()
        self.thread = threading.Thread(target=_look, args=(weakref.ref(self), stop), name="peer watch", daemon=True)
        self.thread.start()
        weakref.finalize(self, _stop, self.thread, stop)

    def look(self) -> None:
        """Once."""
        if self.on and self._peers.ended():
            self._abort()


def _look(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S) and (found := watch()) is not None:
        found.look()
        del found


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():  # which may be the last to have had the watch
        thread.join()


class PeerMemory:
    """One rank's turns with its peers, and its peers' processes."""

    def __init__(self, channel: Channel | None, turns: Turns) -> None:
        self.channel, self.turns = channel, turns
        self._timeout_s = 0.0
        self.failed: PeerError | None = None
        self.pending = ""
        """A low-latency dispatch whose combine is to come."""
        self._watch: Watch | None = None
        if channel is not None and channel.comm.peers is not None:
            self._watch = Watch(channel.comm.peers, turns.abort)

    @property
    def on_host(self) -> bool:
        """Whether kernels are over when their launch returns."""
        return self.turns.device.type == "cpu"

    @property
    def rank(self) -> int:
        return self.turns.shape.rank

    def begin(self, header: Header, timeout_s: float) -> None:
        """Before the first kernel of an operation, whose waits end after ``timeout_s``.

        Raises:
            PeerError: an earlier operation lost a peer, or, on a GPU, failed unnoticed.
            ConfigError: a low-latency dispatch has not been combined.
        """
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)
        if self.pending:
            raise ConfigError(
                f"rank {self.rank} begins {describe(header)} between {self.pending} and its low_latency_combine; these "
                "follow each other, since they share a turn"
            )
        if self.turns.failed:
            # Found while nobody was waiting: how far the others came is not known.
            raise self._ended(self.explain(self.turns.report, header, None))
        self._timeout_s = timeout_s
        if self._watch is not None:
            self._watch.on = True
        self.turns.begin(timeout_s)

    def end(self) -> None:
        """After the last kernel of an operation is queued, or after an error."""
        if self._watch is not None and self.on_host:
            self._watch.on = False

    def check(self, header: Header, ids_TK: Tensor | None = None) -> None:
        """Wait for the last meeting and raise what it, or a kernel after it, found wrong.

        Args:
            ids_TK: this rank's, in a dispatch.

        Raises:
            InputError, RoutingError, RankMismatch, HeapError: on every rank; the next operation works.
            PeerDied, PeerTimeout: nothing works any more.
        """
        try:
            failed = self.turns.wait()
        except PeerTimeout as error:
            self.failed = error
            raise
        if failed:
            self.look(header, ids_TK)

    def look(self, header: Header, ids_TK: Tensor | None = None) -> None:
        """Raise what has gone wrong by now, as ``check`` does."""
        if not self.turns.failed:
            return
        report = self.turns.report
        late = report.turn < self.turns.turn  # found while nobody was waiting, as in ``begin``
        found = self.explain(report, header, None if late else ids_TK)
        if late or isinstance(found, PeerError):
            raise self._ended(found)
        self.turns.forgive()
        raise found

    def _ended(self, found: Exception) -> PeerError:
        """What ends the group's use, if ``found`` was not found by all ranks in the same turn."""
        self.failed = found if isinstance(found, PeerError) else PeerError(f"an earlier operation failed: {found}")
        return self.failed

    def explain(self, report: Report, header: Header, ids_TK: Tensor | None) -> Exception:
        """The error for ``report``."""
        if report.fault in (TIMED_OUT, ABORTED):
            return self._lost(report, header)
        if report.fault == NO_ROOM:
            return HeapError(
                f"rank {report.who} has no room for its rows in {describe(header)}; raise "
                "PeerToPeerOptions.heap_bytes, alike on every rank"
            )
        headers, experts = self.turns.headers, self.turns.shape.experts
        for words in headers:
            if not words[FAULT_WORD]:
                words[-1] = 0  # no text: see ROOM_WORD of steps.py
        for rank, words in enumerate(headers):
            if header.fault is None and words[FAULT_WORD] == BAD_IDS_WORD:
                if rank == self.rank and ids_TK is not None:
                    return routing_error(ids_TK, experts)
                first, value, bad = (int(word) for word in words[FAULT_WORD + 1 : FAULT_WORD + 4])
                return peers_routing_error(rank, bad, first, value, header.top_k, experts)
        return failure([words.tobytes() for words in headers], self.rank, header)

    def _lost(self, report: Report, header: Header) -> PeerError:
        peers = None if self.channel is None else self.channel.comm.peers
        gone = [] if peers is None else peers.ended()
        if peers is not None and gone:
            who = ", ".join(peers.describe(rank) for rank in gone)
            return PeerDied(
                f"rank {self.rank} in {describe(header)}: lost {who}. Restart the ranks; this group is unusable."
            )
        who = f"rank {report.who}" if peers is None else peers.describe(report.who)
        return PeerTimeout(
            f"rank {self.rank} in {describe(header)}: waited {self._timeout_s:g} s for {who} to "
            f"{_DOING.get(report.what, 'send its rows')}; its word stands at {report.seen}, not {report.wanted}. It is "
            "stuck, slow, or took another path through the program; see its stacks (py-spy dump), or raise "
            "DispatchOptions.timeout_s. This group is unusable now."
        )


def peer_memory(
    channel: Channel | None,
    group: ProcessGroup | None,
    rank: int,
    offsets: Sequence[int],
    device: torch.device,
    options: PeerToPeerOptions,
    launcher: Launcher,
) -> PeerMemory:
    """The memory of ``group`` for experts placed at ``offsets``; made on first use, which is collective.

    Args:
        channel: of the group, after a meeting in which ranks compared ``options``; None where a rank is alone.

    Raises:
        HeapError: on every rank, if one has no room.
    """
    total = options.heap_bytes or HEAP_BYTES[device.type]

    def make() -> PeerMemory:
        shape = Shape(rank, tuple(offsets))
        blocks = _blocks(channel, group, rank, device, blocks_bytes(shape, total))
        made = PeerMemory(channel, Turns(shape, blocks, launcher))
        if channel is not None:
            began = torch.zeros(1, dtype=torch.int64).to(channel.control_device)
            channel.all_gather(began, "the start of shared blocks")
        return made

    if channel is None:
        return make()
    # Kept even if it has failed: others may not know, and would not make another.
    return channel.comm.keep(("peer memory", device, tuple(offsets), total), make)


def _blocks(channel: Channel | None, group: ProcessGroup | None, rank: int, device: torch.device, total: int) -> Blocks:
    if channel is None or group is None:
        return alone(total, device)
    if device.type == "cuda":
        problem, blocks = "", None
        try:
            blocks = symmetric(group, device, total)
        except (MoeCommError, RuntimeError) as error:
            problem = str(error)
        told = channel.all_gather(torch.tensor([int(bool(problem))]).to(channel.control_device), "sharing blocks")
        bad = told.flatten().nonzero().flatten().tolist()
        if bad or blocks is None:
            raise HeapError(f"symmetric memory of {total} bytes: {problem or f'ranks {bad} could not set it up'}")
        return blocks
    what = "blocks for peer_to_peer"

    def gather(words: list[int]) -> list[list[int]]:
        told: list[list[int]] = channel.all_gather(torch.tensor(words).to(channel.control_device), what).tolist()
        return told

    return mapped(gather, rank, host_word(), total, what)
