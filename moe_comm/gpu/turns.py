"""One rank's side of the protocol in csrc/cuda/args.h: its block, its heap, and the turns that it takes with its peers.

A turn is one operation on all ranks. ``meet`` begins it: every rank tells what it is about to do (a header), where its
rows stand (an offer) and how many rows it has for each expert (counts), and learns the same of all. Then come the
kernels that move rows, and ``done``. The device counts turns and holds what went wrong; the host reads a report.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.errors import ConfigError, PeerTimeout
from moe_comm.gpu.blocks import ALIGN, Blocks, up
from moe_comm.gpu.heap import Heap, capturing
from moe_comm.gpu.launch import NEEDED, Launcher

HEADER_WORDS = 49
FAULT_WORD = 8
BAD_IDS_WORD = -1
"""What ``meet`` writes over word FAULT_WORD of a header if ``count`` found bad ids; the first bad slot, its id and how
many there are follow."""
OFFER_WORDS = 5
"""Of an offer: rows, rows of another block, scales, links; last, how many rows there is room for."""
NOWHERE = -1
"""The offer of a rank that could not allocate."""
UNLIMITED = -1
MAX_PARTS = 4
"""Blocks of ll_send an expert."""
NO_FAULT, TIMED_OUT, ABORTED, DISAGREE, BAD_IDS, NO_ROOM = 0, 1, 2, 3, 4, 6
TOLD, DONE, ARRIVED, SENT = range(4)
"""What a rank waited for."""
SAME, BLOCK_SCALES, ROW_SCALES = range(3)
"""How rows travel."""

THREADS = {"count": 256, "push": 512, "fan_out": 512, "sum": 512, "spread": 512, "ll_send": 512}
"""Of a block; what waits has one large block."""
MOST_THREADS = 1024
MOST_SLOTS = 512
"""Of a chunk: they stand in a block's shared memory, and each looks at all others."""
RING = 64
"""Headers that may be on their way to the device at a time."""
IN_GRAPHS = 1024
"""Headers in CUDA graphs."""
GRACE_S = 5.0
"""How long after a kernel's own deadline the host takes it for lost."""
SETTLE_S = 0.001
REPORT_WORDS = ("turn", "fault", "who", "what", "wanted", "seen", "rows", "dropped", "overflow", "bad")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """offsets: ``world + 1`` ids; rank r holds experts ``offsets[r]`` to ``offsets[r + 1]``."""

    rank: int
    offsets: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.offsets) - 1

    @property
    def experts(self) -> int:
        return self.offsets[-1]

    @property
    def local_experts(self) -> int:
        """The most that one rank holds."""
        return max(end - first for first, end in pairwise(self.offsets))

    @property
    def own_experts(self) -> slice:
        return slice(self.offsets[self.rank], self.offsets[self.rank + 1])

    @property
    def control_bytes(self) -> int:
        """Of the control area, with which a block begins; see Control in csrc/cuda/args.h."""
        world = self.world
        halves = 2 * world * (HEADER_WORDS + OFFER_WORDS + self.experts)
        return up(8 * (2 * world + halves + self.local_experts * world * (1 + MAX_PARTS)))


@dataclass(frozen=True)
class Report:
    """What the device wrote about the last turn; the fields are those of Report in csrc/cuda/args.h."""

    turn: int
    fault: int
    who: int
    what: int
    wanted: int
    seen: int
    rows: int
    dropped: int
    overflow: int
    bad: int

    @property
    def failed(self) -> bool:
        return self.fault != NO_FAULT


@dataclass(frozen=True, eq=False)
class Slots:
    """T tokens with K slots each, cut into chunks: a block of count and of push each.

    counts_CE: count writes the slots of each chunk for each expert, meet makes first rows of them. bad_C4: dropped
    slots, bad ones, the first bad one, its id.
    """

    ids_TK: Tensor
    chunk: int
    counts_CE: Tensor
    bad_C4: Tensor

    @classmethod
    def of(cls, ids_TK: Tensor, experts: int, blocks: int) -> Slots:
        """Of dense int64 ids, in chunks of whole tokens: about ``blocks``, more if those would be too large."""
        tokens, top_k = ids_TK.shape
        chunk = max(1, min(-(-tokens // blocks), MOST_SLOTS // top_k)) * top_k
        chunks = -(-tokens * top_k // chunk)
        counts_CE = torch.empty(chunks, experts, dtype=torch.int64, device=ids_TK.device)
        return cls(ids_TK, chunk, counts_CE, torch.empty(chunks, 4, dtype=torch.int64, device=ids_TK.device))

    @property
    def chunks(self) -> int:
        return self.counts_CE.shape[0]

    @cached_property
    def words(self) -> dict[str, int]:
        """As kernels take them."""
        return {
            "tokens": self.ids_TK.shape[0],
            "top_k": self.ids_TK.shape[1],
            "ids_at": address(self.ids_TK),
            "chunk": self.chunk,
            "chunks": self.chunks,
            "counts_at": address(self.counts_CE),
            "bad_at": address(self.bad_C4),
        }


class Offer(NamedTuple):
    """What this rank has in its block: bytes from its start, or NOWHERE. room: rows, or UNLIMITED."""

    rows: int = 0
    block: int = 0
    scales: int = 0
    links: int = 0
    room: int = UNLIMITED


@dataclass(frozen=True, eq=False)
class Met:
    """What a meeting writes, on the device; there once it is over.

    offers_W5: of all ranks. counts_WE: rows of each rank for each expert; none without slots. summary:
    [L + 1] first row of each of this rank's experts, then the end; L is the most that any rank has.
    """

    offers_W5: Tensor
    counts_WE: Tensor
    summary: Tensor


_NO_SLOTS = dict.fromkeys(("tokens", "top_k", "ids_at", "chunk", "chunks", "counts_at", "bad_at"), 0)


def address(x: Tensor | None) -> int:
    """Of a tensor's memory; 0 for none."""
    return 0 if x is None else x.data_ptr()  # which is 0 where there is nothing in it


class Turns:
    """One rank's state of the protocol. Launches go to the current stream.

    heap: what follows the control area in this rank's block.
    left_E: zeros that push counts in.

    Args:
        blocks: zeros in every control area.
        launcher: for the device that the blocks are on.
    """

    def __init__(self, shape: Shape, blocks: Blocks, launcher: Launcher) -> None:
        self.shape, self.blocks, self.launcher = shape, blocks, launcher
        self.device = blocks.own.device
        self.heap = Heap(blocks.own, shape.control_bytes)
        self.turn = 0
        self._captured = 0
        self._replays = False
        """Whether there are graphs that count turns when they run."""
        world, experts = shape.world, shape.experts
        self._peers_W = torch.tensor(blocks.addresses, dtype=torch.int64, device=self.device)
        self._offsets = torch.tensor(shape.offsets, dtype=torch.int64, device=self.device)
        self._state = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._report = self.host_words(len(REPORT_WORDS))
        self._abort = self.host_words(1)
        # In one piece and now: page-locked memory cannot be had while a graph is captured.
        self._headers = self.host_words(RING + IN_GRAPHS * (self.device.type == "cuda"), HEADER_WORDS)
        self._all_headers = self.host_words(world, HEADER_WORDS)
        self._all_counts = self.host_words(world, experts)
        self.left_E = torch.zeros(experts, dtype=torch.int64, device=self.device)
        # Looked at without torch: reading one number costs it a microsecond and more.
        self._seen: Ints = self._report.numpy()
        self._abort_seen: Ints = self._abort.numpy()
        self._headers_seen: Ints = self._headers.numpy()
        self._all_headers_seen: Ints = self._all_headers.numpy()
        self._all_counts_seen: Ints = self._all_counts.numpy()
        self._headers_at = address(self._headers)
        no_words = torch.empty(0, dtype=torch.int64, device=self.device)
        self._no_counts_WE, self._no_summary = no_words.view(0, experts), no_words
        self._meet_group = {
            **_NO_SLOTS,
            "with_counts": 0,
            "all_headers_at": address(self._all_headers),
            "all_counts_at": 0,
            "host_counts_at": 0,
            "summary_at": 0,
        }
        self._group = {
            "world": world,
            "rank": shape.rank,
            "experts": experts,
            "local_experts": shape.local_experts,
            "peers_at": address(self._peers_W),
            "offsets_at": address(self._offsets),
            "state_at": address(self._state),
            "report_at": address(self._report),
            "abort_at": address(self._abort),
        }
        self._last: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # other streams find the zeros
        # Kernels may write to these when nobody has this object any more. At exit they just stay.
        held = (self._report, self._abort, self._headers, self._all_headers, self._all_counts, self._peers_W)
        last = weakref.finalize(self, _let_go, self.device, [*held, self._offsets, self._state, self.left_E, blocks])
        last.atexit = False

    def host_words(self, *shape: int) -> Tensor:
        """Zeros, int64, in memory of the host that the device reads and writes."""
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    @property
    def report(self) -> Report:
        """As it stands now."""
        return Report(*self._seen.tolist())

    @property
    def failed(self) -> bool:
        """``report.failed``, at once."""
        return bool(self._seen[1] != NO_FAULT)

    @property
    def headers(self) -> list[Ints]:
        """What every rank said in the last turn that is over, by rank."""
        return list(self._all_headers_seen.copy())

    def said(self, word: int) -> list[int]:
        """That word of ``headers``."""
        words: list[int] = self._all_headers_seen[:, word].tolist()
        return words

    @property
    def counts_WE(self) -> Ints:
        """Rows that every rank has for each expert, of the last turn with counts that is over."""
        return self._all_counts_seen.copy()

    def rows_per_expert(self) -> list[int]:
        """The sums of ``counts_WE`` over ranks."""
        rows_E: list[int] = self._all_counts_seen.sum(0).tolist()
        return rows_E

    def abort(self) -> None:
        """Have kernels that wait leave. From any thread."""
        self._abort_seen[0] = 1

    def launch(self, kernel: str, grid: int, timeout_ns: int, **words: int) -> None:
        """Queue ``kernel`` with the words of the group and ``words``; nothing if it has no blocks."""
        if not grid:
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        threads = THREADS.get(kernel, MOST_THREADS)
        self.launcher.launch(kernel, grid, threads, NEEDED, stream, {**self._group, "timeout_ns": timeout_ns, **words})

    def in_order(self) -> None:
        """Have the current stream wait for that of the last turn, if it is another: turns follow each other."""
        if self.device.type != "cuda" or self._capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream

    def count(self, slots: Slots, timeout_ns: int) -> None:
        """Queue the counting of slots; before ``meet`` with them."""
        self.launch("count", slots.chunks, timeout_ns, **slots.words)

    def meet(self, header: Ints, offer: Offer, timeout_ns: int, slots: Slots | None = None) -> Met:
        """Begin a turn.

        Args:
            header: [HEADER_WORDS] what this rank is about to do.
            slots: that ``count`` has counted, in a dispatch.
        """
        before = self.turn, self._captured
        try:
            return self._meet(self._header_place(header, timeout_ns), offer, timeout_ns, slots)
        except BaseException:
            # Nothing was queued, so the device will not count it.
            self.turn, self._captured = before
            raise

    def ready(self, timeout_ns: int) -> None:
        """Begin and end a turn of few rows: what this rank's experts made may be read."""
        before = self.turn
        try:
            self.count_turn()
            self.launch("ll_ready", 1, timeout_ns)
        except BaseException:
            self.turn = before
            raise

    def _meet(self, header_at: int, offer: Offer, timeout_ns: int, slots: Slots | None) -> Met:
        words = self._meet_group.copy()
        words["header_at"] = header_at
        words["offer_0"], words["offer_1"], words["offer_2"], words["offer_3"], words["offer_4"] = offer
        shape, world = self.shape, len(self.blocks.addresses)
        offers_W5 = torch.empty(world, OFFER_WORDS, dtype=torch.int64, device=self.device)
        words["offers_at"] = address(offers_W5)
        if slots is None:
            met = Met(offers_W5, self._no_counts_WE, self._no_summary)
        else:
            counts_WE = torch.empty(world, shape.experts, dtype=torch.int64, device=self.device)
            summary = torch.empty(shape.local_experts + 1, dtype=torch.int64, device=self.device)
            met = Met(offers_W5, counts_WE, summary)
            words.update(slots.words)
            words.update(
                with_counts=1,
                all_counts_at=address(counts_WE),
                host_counts_at=address(self._all_counts),
                summary_at=address(summary),
            )
        self.launch("meet", 1, timeout_ns, **words)
        return met

    def count_turn(self) -> None:
        """Another turn is queued that the device counts."""
        if self._capturing():
            self._replays = True
        elif self._replays:
            # A graph counts turns whenever it runs, and the host is not asked.
            self.turn = int(self._state[0]) + 1
        else:
            self.turn += 1

    def done(self, timeout_ns: int) -> None:
        """End a turn in which peers read or write this rank's memory."""
        self.launch("done", 1, timeout_ns)

    def wait(self, timeout_ns: int) -> None:
        """Wait until the last meeting is over, but not for the kernels behind it.

        Raises:
            PeerTimeout: the device does not come to it at all.
        """
        self._until(lambda: self._seen[0] >= self.turn or self.failed, timeout_ns)
        if self.failed and self._seen[0] < self.turn:
            time.sleep(SETTLE_S)  # the fault is written before what it is about

    def forgive(self) -> None:
        """After a fault that all ranks have found alike: the next turn may begin."""
        self._state[1:].zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._seen[1:] = 0
        self.turn = int(self._state[0])  # kernels that were queued behind the fault have counted nothing

    def _header_place(self, header: Ints, timeout_ns: int) -> int:
        """Count the turn, and put ``header`` where it stands until the device has read it."""
        if self._capturing():
            # The graph reads this header whenever it runs.
            if self._captured == IN_GRAPHS:
                raise ConfigError(f"CUDA graphs hold at most {IN_GRAPHS} turns of a group's peer_to_peer")
            self.count_turn()
            self._captured += 1
            self._headers_seen[RING + self._captured - 1] = header
            return self._headers_at + (RING + self._captured - 1) * HEADER_WORDS * 8
        self.count_turn()
        if self.turn > RING and not self._replays:
            self._until(lambda: self._seen[0] > self.turn - RING or self.failed, timeout_ns)
        self._headers_seen[self.turn % RING] = header
        return self._headers_at + self.turn % RING * HEADER_WORDS * 8

    def _capturing(self) -> bool:
        return capturing(self.device)

    def _until(self, over: Callable[[], bool], timeout_ns: int) -> None:
        end = 0.0
        while not over():
            time.sleep(0)  # other ranks may be threads of this process
            now = time.monotonic()
            end = end or now + timeout_ns / 1e9 + GRACE_S
            if now > end:
                raise PeerTimeout(
                    f"rank {self.shape.rank}: the device has not begun turn {self.turn} (it is at {int(self._seen[0])})"
                    f" after {timeout_ns / 1e9:g} s; a kernel queued before it does not end"
                )


_kept: list[list[Any]] = []


def _let_go(device: torch.device, held: list[Any]) -> None:
    """Give memory back once no kernel uses it; in the middle of a CUDA graph, which forbids to wait, never."""
    if device.type != "cuda":
        return
    if capturing(device):
        _kept.append(held)
        return
    with suppress(RuntimeError):  # of a kernel, which its own user is told of
        torch.cuda.synchronize(device)
    held.clear()


def blocks_bytes(shape: Shape, heap_bytes: int) -> int:
    """Size of a block with a heap of ``heap_bytes``."""
    return shape.control_bytes + up(heap_bytes, ALIGN)
