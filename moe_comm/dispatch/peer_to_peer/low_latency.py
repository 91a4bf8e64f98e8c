"""Low-latency dispatch of few rows through ``peer_to_peer``, for decoding. One kernel sends, without exchanging counts.

Each (expert, source rank) has a fixed buffer for ``max_tokens`` rows at the owner of the expert:

    expert 0   │ from rank 0: a b · · │ from rank 1: c · · · │        max_tokens 4; counts 2 and 1
    expert 1   │ from rank 0: · · · · │ from rank 1: c d e · │

    ll_send ─▶ [other work] ─▶ ll_arrive ─▶ experts ─▶ ll_ready ─▶ sum

These are kernels (csrc/cuda/args.h). ``LowLatencyHandle.receive`` and ``receive_scaled`` launch ``ll_arrive``, and rows
are in flight until it has run. ``ll_ready`` waits for the ranks that hold experts of this rank's tokens, and not for
other ranks. An offer is the address of a rank's buffer, which ranks exchange once, when they allocate buffers. There is
no backward, and ranks do not compare headers: both would cost a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.comm.header import Header
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.memory import PeerGroupMemory
from moe_comm.dispatch.peer_to_peer.rows import ReceiveBuffer, RowFormat, offset_of
from moe_comm.errors import ConfigError, HeapError, InputError
from moe_comm.gpu.launch import check_shared
from moe_comm.gpu.protocol import MAX_PARTS, NOWHERE, Offer, words_address
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.memory import DTYPE_CODES, address, row_address

MOST_TOKENS = 65535
"""Maximum of ``max_tokens``: a row count is sent in 16 bits of a word."""
BUSY_BLOCKS = 256
"""Approximate number of thread blocks of ll_send."""


@dataclass(frozen=True, eq=False)
class LowLatencyBuffers:
    """Persistent buffers of a rank for received rows and for results that peers read.

    received_W5, results_W5: offers of all ranks for the two buffers, on the device.
    results_RD: memory of ``LowLatencyHandle.results``.
    """

    max_tokens: int
    received: ReceiveBuffer
    results_RD: Tensor
    received_W5: Tensor
    results_W5: Tensor


def make_buffers(
    memory: PeerGroupMemory, row_format: RowFormat, max_tokens: int, operation: Header
) -> LowLatencyBuffers:
    """Allocate buffers and exchange their addresses. Collective."""
    if not 0 < max_tokens <= MOST_TOKENS:
        raise ConfigError(f"max_tokens must be between 1 and {MOST_TOKENS}; got {max_tokens}")
    operations, shape = memory.operations, memory.operations.shape
    words = {"hidden": row_format.hidden, "dtype": DTYPE_CODES[row_format.dtype], "format": row_format.packing}
    check_shared("ll_send", operations.device, f"max_tokens={max_tokens}", max_tokens=max_tokens, **words)
    own = shape.own_experts
    num_rows = (own.stop - own.start) * shape.world * max_tokens
    problem: HeapError | None = None
    received, results_RD = None, None
    try:
        received = row_format.allocate(operations.heap, num_rows)
        results_RD = operations.heap.rows(num_rows, row_format.hidden, row_format.dtype)
        results_RD.zero_()
    except HeapError as error:
        problem = error
    received_W5 = _exchange_offers(memory, operation, None if received is None else received.offer)
    results_offer = None if results_RD is None else Offer(offset_of(operations.heap, results_RD))
    results_W5 = _exchange_offers(memory, operation, results_offer)
    if received is None or results_RD is None:
        raise problem or HeapError("no room")
    return LowLatencyBuffers(max_tokens, received, results_RD, received_W5, results_W5)


def _exchange_offers(memory: PeerGroupMemory, operation: Header, offer: Offer | None) -> Tensor:
    """Return [W, 5], a copy of the offers of all ranks, on the device."""
    memory.current = operation
    memory.operations.meet(operation.pack().tobytes(), offer or Offer(NOWHERE))
    memory.check()
    return memory.operations.scratch.offers_W5.clone()


@dataclass(eq=False)
class LowLatencyHandle:
    """Rows in flight of a low-latency dispatch.

    place_TK: location of each slot's row; -1 for a dropped slot. has_received: whether ``receive`` was called.
    """

    memory: PeerGroupMemory
    buffers: LowLatencyBuffers
    operation: Operation
    place_TK: Tensor
    has_received: bool = False

    @property
    def results(self) -> Tensor:
        """[L, W * max_tokens, D] buffer that peers read in ``low_latency_combine``. Write to it after ``receive``."""
        return self._by_expert(self.buffers.results_RD)

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait on the device until all rows have been received.

        Returns:
            rows_LND: [L, N, D] with N = W * max_tokens, for this rank's L experts. The rows of rank w for expert e are
                ``rows[e, w * max_tokens:][:counts[e, w]]``; other rows are undefined. Valid until the next
                ``low_latency_dispatch``.
            counts_LW: [L, W] int64, on the device.

        Raises:
            PeerTimeout, PeerDied: on the CPU. On a GPU the next call raises them.
        """
        counts_LW = self._wait()
        return self._by_expert(self.buffers.received.rows(counts_LW)), counts_LW

    def receive_scaled(self) -> tuple[ScaledRows, Tensor]:
        """Do the same without a kernel that decodes the rows, for GEMMs that take values and scales.

        Returns:
            rows: the received bytes of [L * N, D], in the order of ``receive``. The wire dtype of dispatch must be fp8.
            counts_LW: as ``receive``. ``grouped_mm_fp8`` takes both.

        Raises:
            ConfigError: the wire dtype of dispatch is not fp8; before this rank waits.
            PeerTimeout, PeerDied: as in ``receive``.
        """
        received = self.buffers.received
        if received.scale_RS is None:
            wire_dtype = received.row_format.wire_dtype.name
            raise ConfigError(f"receive_scaled needs an fp8 wire dtype of dispatch; rows were sent as {wire_dtype!r}")
        return received.scaled(), self._wait()

    def _by_expert(self, rows_RD: Tensor) -> Tensor:
        own, world = self.memory.operations.shape.own_experts, self.memory.operations.shape.world
        return rows_RD.view(own.stop - own.start, world * self.buffers.max_tokens, rows_RD.shape[1])

    def _wait(self) -> Tensor:
        """Queue the kernel that waits for all rows. Return the rows of each (expert, source)."""
        operations, shape = self.memory.operations, self.memory.operations.shape
        num_local = shape.own_experts.stop - shape.own_experts.start
        counts_LW = torch.empty(shape.local_experts, shape.world, dtype=torch.int64, device=operations.device)
        operations.begin(self.operation.dispatcher.options.timeout_s)
        operations.plan.receive_few(parts_of(shape.experts), words_address(counts_LW))
        self.has_received = True
        if self.memory.emulated:
            self.memory.current = self.operation
            try:
                self.memory.raise_fault()
            finally:
                self.memory.end()
        return counts_LW[:num_local]


def send_low_latency(
    memory: PeerGroupMemory, buffers: LowLatencyBuffers, x_TD: Tensor, ids_TK: Tensor, operation: Operation
) -> LowLatencyHandle:
    """Queue the kernel that sends ``x_TD`` (dense rows) to the experts ``ids_TK`` (dense int64)."""
    row_format, operations = buffers.received.row_format, memory.operations
    if x_TD.shape[0] > buffers.max_tokens:
        raise InputError(f"low-latency dispatch takes at most max_tokens={buffers.max_tokens}; got {x_TD.shape[0]}")
    tokens, top_k = ids_TK.shape
    place_TK = torch.empty_like(ids_TK)
    operations.plan.send_few(
        tokens,
        top_k,
        words_address(ids_TK),
        row_format.hidden,
        DTYPE_CODES[row_format.dtype],
        *row_address(x_TD, row_format.dtype, (tokens, row_format.hidden), operations.device.type),
        words_address(buffers.received_W5),
        words_address(place_TK),
        buffers.max_tokens,
        parts_of(operations.shape.experts),
        *row_format.words,
    )
    return LowLatencyHandle(memory, buffers, operation, place_TK)


def sum_low_latency(sent: LowLatencyHandle, weights_TK: Tensor, blocks: int) -> Tensor:
    """Queue the sum of each token's results, [T, D]. ``sent.results`` contains this rank's results."""
    operations, row_format = sent.memory.operations, sent.buffers.received.row_format
    tokens, top_k = sent.place_TK.shape
    y_TD = torch.empty(tokens, row_format.hidden, dtype=row_format.dtype, device=operations.device)
    operations.count_turn()
    operations.plan.sum_few(
        blocks,
        tokens,
        top_k,
        row_format.hidden,
        DTYPE_CODES[row_format.dtype],
        words_address(sent.place_TK),
        address(weights_TK, torch.float32, sent.place_TK.shape, operations.device.type),
        address(y_TD, row_format.dtype, device=operations.device.type),
        words_address(sent.buffers.results_W5),
    )
    return y_TD


def parts_of(experts: int) -> int:
    """Return the number of thread blocks of ll_send per expert; equal on all ranks."""
    return max(1, min(MAX_PARTS, BUSY_BLOCKS // experts))
