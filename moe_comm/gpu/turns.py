"""One rank's side of the protocol in csrc/cuda/args.h: its block, its heap, and the turns that it takes with its peers.

A turn is one operation on all ranks. A meeting begins it: every rank tells what it is about to do (a header), where its
rows stand (an offer) and how many rows it has for each expert (counts), and learns the same of all. Then come the
kernels that move rows, and ``done``. The device counts turns and holds what went wrong; the host reads a report.

The launches of an operation are one or two calls of native code (csrc/cuda/plan.h), which keeps what does not change
from one operation to the next.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, PeerTimeout
from moe_comm.gpu.blocks import Blocks
from moe_comm.gpu.heap import Heap, capturing, current_stream
from moe_comm.gpu.launch import Launcher, make_plan, starter_of
from moe_comm.gpu.protocol import (
    HEADER_WORDS,
    NOT_RELAYED,
    OFFER_WORDS,
    REPORT_WORDS,
    Counted,
    Ints,
    Links,
    Offer,
    Report,
    Shape,
    address,
    chunk_of,
)

RING = 64
"""Headers that may be on their way to the device at a time."""
IN_GRAPHS = 1024
"""Headers in CUDA graphs."""
GRACE_S = 5.0
"""How long after a kernel's own deadline the host takes it for lost."""
SETTLE_S = 0.001
SLICE_NS = 50_000_000
"""How long native code waits before Python may look at signals."""


class Scratch(NamedTuple):
    """What kernels of one turn hand each other, on the device.

    counts_CE: count writes the slots of each chunk for each expert, meet makes first rows of them. bad_C4: dropped
    slots, bad ones, the first bad one, its id. offers_W5: of all ranks. counts_WE: rows of each rank for each expert.
    summary: [L + 1] first row of each of this rank's experts, then the end; L is the most that any rank has.
    """

    counts_CE: Tensor
    bad_C4: Tensor
    offers_W5: Tensor
    counts_WE: Tensor
    summary: Tensor

    @classmethod
    def of(cls, shape: Shape, chunks: int, device: torch.device) -> Scratch:
        def words(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.int64, device=device)

        world, experts = shape.world, shape.experts
        return cls(
            words(chunks, experts),
            words(chunks, 4),
            words(world, OFFER_WORDS),
            words(world, experts),
            words(shape.local_experts + 1),
        )


class Turns:
    """One rank's state of the protocol. Launches of an operation go to the stream that is current when it begins.

    heap: what follows the control area in this rank's block.
    scratch: of the last meeting, until the next.

    Args:
        blocks: zeros in every control area.
        launcher: for the device that the blocks are on.
    """

    def __init__(self, shape: Shape, blocks: Blocks, launcher: Launcher) -> None:
        self.shape, self.blocks, self.launcher = shape, blocks, launcher
        self.device = blocks.own.device
        self.heap = Heap(blocks.own, shape.control_bytes)
        self._captured, self._capturing, self._timeout_s = 0, False, 0.0
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
        # Zeros that push counts in.
        self._left_E = torch.zeros(experts, dtype=torch.int64, device=self.device)
        # Looked at without torch: reading one number costs it a microsecond and more.
        self._seen: Ints = self._report.numpy()
        self._abort_seen: Ints = self._abort.numpy()
        self._all_headers_seen: Ints = self._all_headers.numpy()
        group = (
            world,
            shape.rank,
            experts,
            shape.local_experts,
            address(self._peers_W),
            address(self._offsets),
            address(self._state),
            address(self._report),
            address(self._abort),
        )
        host = address(self._headers), address(self._all_headers), address(self._all_counts)
        self.plan = make_plan(starter_of(launcher), group, shape.offsets, *host, address(self._left_E))
        self.scratch = Scratch.of(shape, 0, self.device)
        self._scratches = [self.scratch]
        """What was used outside of graphs, the last is; kernels may still use the others. Each is twice as large."""
        self.plan.use([address(part) for part in self.scratch])
        self._last: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # other streams find the zeros
        # Kernels may write to these when nobody has this object any more. At exit they just stay.
        held = [self._report, self._abort, self._headers, self._all_headers, self._all_counts, self._peers_W]
        held += [self._offsets, self._state, self._left_E]
        last = weakref.finalize(self, _let_go, self.device, [*held, self._scratches, blocks])
        last.atexit = False

    def host_words(self, *shape: int) -> Tensor:
        """Zeros, int64, in memory of the host that the device reads and writes."""
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    @property
    def turn(self) -> int:
        """How many turns have been queued; the device counts them when they run."""
        return self.plan.turn

    @property
    def report(self) -> Report:
        """As it stands now."""
        return Report(*self._seen.tolist())

    @property
    def failed(self) -> bool:
        """Whether the report tells of a fault, at once."""
        return self.plan.failed()

    @property
    def headers(self) -> list[Ints]:
        """What every rank said in the last turn that is over, by rank."""
        return list(self._all_headers_seen.copy())

    def counted(self, word: int) -> Counted:
        """Of the last turn with counts, once that is over. word: of the headers."""
        return Counted(*self.plan.counted(word))

    def abort(self) -> None:
        """Have kernels that wait leave. From any thread."""
        self._abort_seen[0] = 1

    # --- operations, each after ``begin``; header: HEADER_WORDS as bytes, what this rank is about to do ---

    def begin(self, timeout_s: float) -> None:
        """An operation begins, on the current stream and behind the last one: turns follow each other.

        Args:
            timeout_s: how long each of its kernels waits.
        """
        handle, self._timeout_s = 0, timeout_s
        if self.device.type == "cuda":
            self._capturing = capturing(self.device)
            stream = current_stream(self.device)
            handle = stream.cuda_stream
            if not self._capturing and self._last != stream:
                if self._last is not None:
                    stream.wait_stream(self._last)
                self._last = stream
        self.plan.begin(handle, int(timeout_s * 1e9), self._capturing)

    def count_and_meet(self, header: bytes, ids_TK: Tensor, blocks: int, offer: Offer) -> None:
        """Queue the counting of slots, and a meeting that tells how many.

        Args:
            ids_TK: dense int64; the slots that ``move`` will move.
            blocks: about how many blocks shall count, and move.
        """
        tokens, top_k = ids_TK.shape
        chunk = chunk_of(tokens, top_k, blocks)
        self._prepare(-(-tokens * top_k // chunk))
        slot = self._slot()
        self.plan.count_and_meet(tokens, top_k, address(ids_TK), chunk, header, slot, offer)

    def meet(self, header: bytes, offer: Offer) -> None:
        """Queue a meeting without counts. ``scratch`` has its offers, and still what was counted before."""
        self.plan.meet(header, self._slot(), offer)

    def move(
        self, x_TD: Tensor, place_TK: Tensor, dtype: int, form: tuple[int, int], links: Links = NOT_RELAYED
    ) -> None:
        """Queue what moves rows to where the ranks offered room in the last meeting; the slots are those last counted.

        Args:
            x_TD: rows of unit stride. place_TK: written: where each slot's row is.
            dtype: as ``runtime.memory.DTYPE_CODES`` has it.
            form: how they travel, and whether scales are powers of two.
        """
        stride = x_TD.stride(0) * x_TD.element_size()
        self.plan.move(address(x_TD), stride, x_TD.shape[1], dtype, address(place_TK), *form, links)

    def sum(
        self,
        header: bytes,
        offer: Offer,
        place_TK: Tensor,
        weights_TK: Tensor | None,
        y_TD: Tensor,
        dtype: int,
        blocks: int,
    ) -> None:
        """Queue a turn that writes to ``y_TD``, dense, the sum of each token's rows, which stand in peers' offers.

        Args:
            weights_TK: dense fp32, or None for ones.
            dtype: as ``runtime.memory.DTYPE_CODES`` has it. blocks: of the kernel, at most.
        """
        self._prepare(0)
        slot = self._slot()
        tokens, top_k = place_TK.shape
        places = address(place_TK), address(weights_TK)
        self.plan.sum(header, slot, offer, blocks, tokens, top_k, y_TD.shape[1], dtype, *places, address(y_TD))

    def spread(
        self,
        header: bytes,
        offer: Offer,
        place_TK: Tensor,
        weights_TK: Tensor,
        grad_TD: Tensor,
        dots_TK: Tensor | None,
        dtype: int,
        blocks: int,
    ) -> None:
        """Queue a turn that writes each token's gradient, weighted, to its places in the block that peers offer second.

        Args:
            grad_TD: rows of unit stride.
            dots_TK: written, unless None: products of the gradient with the rows of the first offer.
        """
        self._prepare(0)
        slot = self._slot()
        tokens, top_k = place_TK.shape
        places = address(place_TK), address(weights_TK)
        rows = grad_TD.shape[1], dtype
        grad = address(grad_TD), grad_TD.stride(0) * grad_TD.element_size()
        self.plan.spread(header, slot, offer, blocks, tokens, top_k, *rows, *places, *grad, address(dots_TK))

    def count_turn(self) -> None:
        """Before a turn is queued: one of a graph is counted when that runs, and the host is not asked."""
        if self._capturing:
            self._replays = True
        elif self._replays:
            self.plan.turn = int(self._state[0])

    # --- what came of them ---

    def wait(self) -> bool:
        """Wait until the last meeting is over, but not for the kernels behind it; whether something has ``failed``.

        Raises:
            PeerTimeout: the device does not come to it at all.
        """
        turn = self.plan.turn
        self._until(turn)
        if not self.plan.failed():
            return False
        if self.plan.seen_turn() < turn:
            time.sleep(SETTLE_S)  # the fault is written before what it is about
        return True

    def forgive(self) -> None:
        """After a fault that all ranks have found alike: the next turn may begin."""
        self._state[1:].zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._seen[1:] = 0
        self.plan.turn = int(self._state[0])  # kernels that were queued behind the fault have counted nothing

    def _prepare(self, chunks: int) -> None:
        """Have scratch of a turn whose slots are in so many chunks. Each in a graph has its own: graphs outlive it."""
        if self._capturing:
            scratch = Scratch.of(self.shape, chunks, self.device)
        elif (most := self._scratches[-1].bad_C4.shape[0]) < chunks:
            scratch = Scratch.of(self.shape, max(chunks, 2 * most), self.device)
            self._scratches.append(scratch)
        else:
            scratch = self._scratches[-1]
        if scratch is not self.scratch:
            self.scratch = scratch
            self.plan.use([address(part) for part in scratch])

    def _slot(self) -> int:
        """Where the header of the next turn stands until the device has read it; one that is free."""
        self.count_turn()
        if self._capturing:
            # The graph reads this header whenever it runs.
            if self._captured == IN_GRAPHS:
                raise ConfigError(f"CUDA graphs hold at most {IN_GRAPHS} turns of a group's peer_to_peer")
            self._captured += 1
            return RING + self._captured - 1
        turn = self.plan.turn + 1
        if turn > RING and not self._replays:
            self._until(turn - RING + 1)
        return turn % RING

    def _until(self, turn: int) -> None:
        """Wait until ``turn`` is over or something has failed."""
        if self.plan.wait(turn, SLICE_NS):
            return
        end = time.monotonic() + self._timeout_s + GRACE_S
        while not self.plan.wait(turn, SLICE_NS):
            if time.monotonic() > end:
                raise PeerTimeout(
                    f"rank {self.shape.rank}: the device has not begun turn {turn} (it is at {self.plan.seen_turn()})"
                    f" after {self._timeout_s:g} s; a kernel queued before it does not end"
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
