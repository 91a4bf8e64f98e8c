"""One rank's side of the protocol in csrc/cuda/args.h: its block, its heap and the operations of its group.

An operation of all ranks (a ``turn`` in csrc/cuda) begins with a handshake, in which the device exchanges headers (the
operation that a rank starts), offers (addresses of its rows) and counts (rows for each expert). Then kernels move rows,
and ``done`` ends the operation. The device counts operations and records faults; the CPU reads them in a report.

An operation takes one call of native code (``plan``, csrc/cuda/plan.h), which keeps the arguments that do not change.
The methods here translate tensors into addresses and choose the scratch memory.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, PeerTimeout
from moe_comm.gpu.blocks import Blocks
from moe_comm.gpu.heap import Heap, capturing, current_stream
from moe_comm.gpu.launch import Launcher
from moe_comm.gpu.protocol import (
    HEADER_WORDS,
    OFFER_WORDS,
    REPORT_WORDS,
    FaultReport,
    GroupShape,
    Ints,
    Offer,
    Reduction,
    RelayLinks,
    RowFlags,
    Sending,
    chunk_of,
    words_address,
)
from moe_comm.runtime.memory import address, row_address
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm import _C

RING = 64
"""Maximum number of headers that the device has not read yet."""
IN_GRAPHS = 1024
"""Maximum number of headers in CUDA graphs."""
GRACE_S = 5.0
"""Time after a kernel's own deadline at which the CPU raises."""
SETTLE_S = 0.001
"""Time between a fault and its details in the report."""
SLICE_NS = 50_000_000
"""Maximum time in native code before Python can handle signals."""


class Scratch(NamedTuple):
    """Device memory that the kernels of one operation share.

    A chunk is the slots, (token, expert) pairs, that one thread block of count or push processes. C is their number.
    counts_CE: slots of each chunk for each expert, written by count; scan replaces them by the sum of earlier chunks.
    bad_C4: dropped slots, invalid slots, the first invalid slot, and its id, of each chunk.
    rows_E: this rank's slots for each expert, written by scan; meet replaces them by their first row at the owner.
    offers_W5: offers of all ranks. counts_WE: number of rows of each rank for each expert.
    summary: [L + 1] first row of each of this rank's experts, then the end. L is the maximum of all ranks.
    """

    counts_CE: Tensor
    bad_C4: Tensor
    rows_E: Tensor
    offers_W5: Tensor
    counts_WE: Tensor
    summary: Tensor

    @classmethod
    def of(cls, shape: GroupShape, chunks: int, device: torch.device) -> Scratch:
        def words(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.int64, device=device)

        world, experts = shape.world, shape.experts
        return cls(
            words(chunks, experts),
            words(chunks, 4),
            words(experts),
            words(world, OFFER_WORDS),
            words(world, experts),
            words(shape.local_experts + 1),
        )


class GroupOperations:
    """One rank's state of the protocol. Kernels of an operation run on the stream that is current in ``begin``.

    ``heap`` follows the control area in this rank's block. ``scratch`` belongs to the last handshake. ``blocks`` must
    have zeros in the control areas, and ``launcher`` must be for their device.
    """

    def __init__(self, shape: GroupShape, blocks: Blocks, launcher: Launcher) -> None:
        self.shape, self.blocks, self.launcher = shape, blocks, launcher
        self.device = blocks.own.device
        self._on_gpu = self.device.type == "cuda"
        self.heap = Heap(blocks.own, shape.control_bytes)
        self._captured, self._capturing, self._timeout_s = 0, False, 0.0
        self._replays = False
        """Whether there are graphs, which count operations when they run."""
        world, experts = shape.world, shape.experts
        self._peers_W = torch.tensor(blocks.addresses, dtype=torch.int64, device=self.device)
        self._offsets = torch.tensor(shape.offsets, dtype=torch.int64, device=self.device)
        self._state = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._report = self.cpu_words(len(REPORT_WORDS))
        self._abort = self.cpu_words(1)
        # Allocate all headers now: page-locked memory cannot be allocated during a capture.
        self._headers = self.cpu_words(RING + IN_GRAPHS * (self.device.type == "cuda"), HEADER_WORDS)
        self._all_headers = self.cpu_words(world, HEADER_WORDS)
        self._all_counts = self.cpu_words(world, experts)
        # Counters of the push kernel, which expects zeros and leaves zeros.
        self._left_E = torch.zeros(experts, dtype=torch.int64, device=self.device)
        # numpy views, because reading one number of a tensor takes a microsecond.
        self._report_words: Ints = self._report.numpy()
        self._abort_word: Ints = self._abort.numpy()
        self._all_header_words: Ints = self._all_headers.numpy()
        self._all_count_words: Ints = self._all_counts.numpy()
        memory = self._peers_W, self._offsets, self._state, self._report, self._abort
        group = world, shape.rank, experts, shape.local_experts, *map(words_address, memory)
        read_by_cpu = map(words_address, (self._headers, self._all_headers, self._all_counts))
        self.plan: _C.P2pPlan = native().P2pPlan(
            launcher.starter, group, shape.offsets, *read_by_cpu, words_address(self._left_E)
        )
        self.scratch = Scratch.of(shape, 0, self.device)
        self._scratches = [self.scratch]
        """Scratch outside of graphs. Kernels may still use all but the last one. Sizes at least double."""
        self._chunks = 0
        """Chunks of slots that the last scratch has room for."""
        self.plan.use([words_address(words) for words in self.scratch])
        self._last: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # other streams find the zeros
        # Kernels may write to this memory after this object is gone. At exit it is not freed.
        buffers = [*memory, self._headers, self._all_headers, self._all_counts, self._left_E, self._scratches, blocks]
        weakref.finalize(self, _free, self.device, buffers).atexit = False

    def cpu_words(self, *shape: int) -> Tensor:
        """Return int64 zeros in CPU memory that the device can read and write."""
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda", device="cpu")

    @property
    def turn(self) -> int:
        """Number of queued operations. The device counts them when they run."""
        return self.plan.turn

    @property
    def report(self) -> FaultReport:
        """The current report."""
        return FaultReport(*self._report_words.tolist())

    @property
    def failed(self) -> bool:
        """Whether the report contains a fault. Does not wait."""
        return self.plan.failed()

    @property
    def headers(self) -> list[Ints]:
        """Headers of all ranks in the last completed operation."""
        return list(self._all_header_words.copy())

    def abort(self) -> None:
        """Make waiting kernels end. Any thread may call this."""
        self._abort_word[0] = 1

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` was called."""
        return bool(self._abort_word[0])

    # --- operations, each after ``begin``; header: this rank's header as HEADER_WORDS words in bytes ---

    def begin(self, timeout_s: float) -> None:
        """Begin an operation on the current stream. Each of its kernels waits for up to ``timeout_s``."""
        handle, self._timeout_s = 0, timeout_s
        if self._on_gpu:
            self._capturing = capturing(self.device)
            stream = current_stream(self.device)
            handle = stream.cuda_stream
            if not self._capturing and self._last != stream:
                if self._last is not None:
                    stream.wait_stream(self._last)
                self._last = stream
        self.plan.begin(handle, int(timeout_s * 1e9), self._capturing)

    def dispatch(
        self,
        header: bytes,
        offer: Offer,
        ids_TK: Tensor,
        place_TK: Tensor,
        x_TD: Tensor,
        dtype: int,
        how: Sending,
        links: RelayLinks,
    ) -> None:
        """Count the slots of each expert, exchange the counts, and move rows to the peers' offers.

        ``plan.counted`` returns the counts after ``wait``. Rows beyond the capacity of an offer are not moved.

        Args:
            offer: this rank's buffer for rows.
            ids_TK: experts, dense int64.
            place_TK: output, dense int64: location of each slot's row; -1 without a row.
            x_TD: rows of unit stride.
        """
        tokens, top_k = ids_TK.shape
        chunk = chunk_of(tokens, top_k)
        x_at, stride = row_address(x_TD, x_TD.dtype, device=self.device.type)
        self.plan.dispatch(
            header, self.begin_turn(-(-tokens * top_k // chunk)), offer, tokens, top_k, words_address(ids_TK),
            words_address(place_TK), chunk, x_at, stride, x_TD.shape[1], dtype, how, links,
        )  # fmt: skip

    def arrive(self, first_source: int, sources: int) -> None:
        """Queue the wait for the rows of ``sources`` ranks, after a dispatch that does not wait for them."""
        self.plan.arrive(first_source, sources)

    def received(self, source: int) -> bool:
        """Return whether all rows of the rank ``source`` have been written. Only when emulated."""
        return self.plan.received(source)

    def flags(self, part: str) -> RowFlags:
        """Return the flags of the last operation that begin at ``part`` of the control area: "arrived" or "results"."""
        shape = self.shape
        first_flag = native().p2p_control(shape.world, shape.experts, shape.local_experts)[part]
        memory = self._peers_W, self._state, self._report, self._abort
        return RowFlags(*memory, shape.rank, shape.world, first_flag, self.turn, int(self._timeout_s * 1e9))

    def counts_WE(self) -> Ints:
        """Return the rows of each rank for each expert in the last completed handshake with counts."""
        return self._all_count_words.copy()

    def meet(self, header: bytes, offer: Offer) -> None:
        """Exchange headers and offers without counts."""
        self.plan.meet(header, self.begin_turn(0), offer)

    def sum(
        self,
        header: bytes,
        offer: Offer,
        place_TK: Tensor,
        weights_TK: Tensor | None,
        y_TD: Tensor,
        dtype: int,
        blocks: int,
        dots_TK: Tensor | None = None,
    ) -> None:
        """Write the sum of each token's rows, which peers offer, to ``y_TD`` (dense).

        ``weights_TK`` is dense fp32, or None for ones. ``blocks`` is the maximum number of thread blocks. Unless
        ``dots_TK`` (dense fp32) is None, it is set to the number of each slot's row, which peers offer as scales.
        """
        of_rows = self._sum_words(place_TK, weights_TK, y_TD, dtype)
        dots_at = 0
        if dots_TK is not None:
            dots_at = address(dots_TK, torch.float32, place_TK.shape, self.device.type)
        self.plan.sum(header, self.begin_turn(0), offer, blocks, *of_rows, dots_at)

    def sum_slices(self, place_TK: Tensor, weights_TK: Tensor | None, y_TD: Tensor, dtype: int, blocks: int) -> None:
        """After ``meet``: sum each slice of columns, as ``sum`` does, once peers have set its flag."""
        self.plan.sum_slices(blocks, *self._sum_words(place_TK, weights_TK, y_TD, dtype))

    def sum_reduced(
        self,
        header: bytes,
        offer: Offer,
        place_TK: Tensor,
        weights_TK: Tensor,
        y_TD: Tensor,
        dtype: int,
        blocks: int,
        own: Reduction,
    ) -> None:
        """As ``sum``, but each rank first reduces its rows of a token to one row.

        offer: addresses of this rank's rows, reduced rows and links, as in ``own``. The links must be zero.
        """
        words = self._sum_words(place_TK, weights_TK, y_TD, dtype)
        self.plan.sum_reduced(header, self.begin_turn(0), offer, blocks, *words, own)

    def _sum_words(
        self, place_TK: Tensor, weights_TK: Tensor | None, y_TD: Tensor, dtype: int
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the arguments of a sum: tokens, top_k, hidden, dtype, and the addresses of the dense tensors."""
        weights_at = address(weights_TK, torch.float32, place_TK.shape, self.device.type)
        y_at = address(y_TD, y_TD.dtype, device=self.device.type)
        return *place_TK.shape, y_TD.shape[1], dtype, words_address(place_TK), weights_at, y_at

    def spread(
        self,
        header: bytes,
        offer: Offer,
        place_TK: Tensor,
        weights_TK: Tensor | None,
        grad_TD: Tensor,
        dots_TK: Tensor | None,
        dtype: int,
        blocks: int,
        order: Tensor | None = None,
        sent_TK: Tensor | None = None,
    ) -> None:
        """Write each token's weighted gradient (rows of unit stride) into the peers' second offer.

        Weights are ones for None. Unless ``dots_TK`` is None, it is set to the dot products of the gradients and the
        rows of the first offer. With ``order`` of the dispatch, rows are written by expert, with a flag for each tile.
        When emulated, the caller then ends the operation with ``plan.done``. ``sent_TK`` (dense fp32) are numbers that
        are sent with the rows, to the scales that peers offer.
        """
        tokens, top_k = place_TK.shape
        kind = self.device.type
        of_slots = (weights_TK, dots_TK, sent_TK)
        weights_at, dots_at, sent_at = (address(x, torch.float32, place_TK.shape, kind) for x in of_slots)
        grad_at, stride = row_address(grad_TD, grad_TD.dtype, device=kind)
        self.plan.spread(
            header, self.begin_turn(0), offer, blocks, tokens, top_k, grad_TD.shape[1], dtype, words_address(place_TK),
            weights_at, grad_at, stride, dots_at, sent_at, words_address(order), self._on_gpu or order is None,
        )  # fmt: skip

    def count_turn(self) -> None:
        """Read the number of operations from the device before one is queued, because it also counts replays of
        graphs."""
        if self._capturing:
            self._replays = True
        elif self._replays:
            self.plan.turn = int(self._state[0])

    # --- results ---

    def wait(self) -> None:
        """Wait until the last handshake has completed, but not for later kernels, or until there is a fault."""
        plan = self.plan
        turn = plan.turn
        self._wait_for(turn)
        if plan.failed() and plan.completed_turn() < turn:
            time.sleep(SETTLE_S)  # the device writes the fault before its details

    def reset_fault(self) -> None:
        """Clear a fault that all ranks have raised, so that the next operation can begin."""
        self._state[1:].zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._report_words[1:] = 0
        self.plan.turn = int(self._state[0])  # kernels queued after the fault have not counted

    def begin_turn(self, chunks: int) -> int:
        """Select scratch for an operation with ``chunks`` chunks of slots. Return a free position for its header."""
        if chunks > self._chunks or self._capturing or self._replays or self.scratch is not self._scratches[-1]:
            self._prepare(chunks)
            return self._next_header_index()
        turn = self.plan.turn + 1
        if turn > RING and not self.plan.wait(turn - RING + 1, 0):
            self._wait_for(turn - RING + 1)
        return turn % RING

    def reserve(self, turns: int, chunks: int) -> bool:
        """Prepare ``turns`` operations that a record launches after ``begin``, with at most ``chunks`` chunks of slots.

        Returns:
            False if a record cannot launch them: graphs keep the headers of their operations.
        """
        if self._capturing or self._replays:
            return False
        if chunks > self._chunks or self.scratch is not self._scratches[-1]:
            self._prepare(chunks)
        turn = self.plan.turn + turns - RING + 1
        if turn > 1 and not self.plan.wait(turn, 0):
            self._wait_for(turn)
        return True

    def _prepare(self, chunks: int) -> None:
        """Select scratch for an operation with ``chunks`` chunks of slots. Each operation of a graph gets its own."""
        if self._capturing:
            scratch = Scratch.of(self.shape, chunks, self.device)
        elif self._chunks < chunks:
            self._chunks = max(chunks, 2 * self._chunks)
            scratch = Scratch.of(self.shape, self._chunks, self.device)
            self._scratches.append(scratch)
        else:
            scratch = self._scratches[-1]
        if scratch is not self.scratch:
            self.scratch = scratch
            self.plan.use([words_address(words) for words in scratch])

    def _next_header_index(self) -> int:
        """Return a free position for the next header, which the device reads later."""
        self.count_turn()
        if self._capturing:
            # The graph reads this header in every replay.
            if self._captured == IN_GRAPHS:
                raise ConfigError(f"CUDA graphs hold at most {IN_GRAPHS} operations of a group's peer_to_peer")
            self._captured += 1
            return RING + self._captured - 1
        turn = self.plan.turn + 1
        if turn > RING and not self._replays:
            self._wait_for(turn - RING + 1)
        return turn % RING

    def _wait_for(self, turn: int) -> None:
        """Wait until ``turn`` has completed or there is a fault."""
        end = time.monotonic() + self._timeout_s + GRACE_S
        while not self.plan.wait(turn, SLICE_NS):
            if time.monotonic() > end:
                raise PeerTimeout(
                    f"rank {self.shape.rank}: the device has not begun turn {turn} after {self._timeout_s:g} s "
                    f"(it is at {self.plan.completed_turn()}); a kernel queued before it does not end"
                )


def _free(device: torch.device, buffers: list[Any]) -> None:
    """Free memory after all kernels have completed. During a capture, which cannot wait, leak it."""
    if device.type != "cuda":
        return
    if capturing(device):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffers))
        return
    with suppress(RuntimeError):  # the error of a kernel is raised elsewhere
        torch.cuda.synchronize(device)
    buffers.clear()
