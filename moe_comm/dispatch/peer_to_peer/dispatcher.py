"""``peer_to_peer``: kernels write rows directly into the memory of other GPUs, and read results in place.

    rank 0   count ─▶ scan ─▶ meet ─▶ push ──── rows ───▶ rank 1's block
    rank 1   count ─▶ scan ─▶ meet ─▶ arrive ◀─ a flag per expert and source rank, set after its rows

The words in the diagram are kernels, queued in one call. ``count`` and ``scan`` count the rows of each expert. ``meet``
waits for all ranks and exchanges headers, counts, and the addresses of the largest free block of each rank's heap; this
is a handshake, which the last block of ``scan`` runs. ``push`` writes the rows there. Meanwhile the CPU reads the
counts, and frees the memory that the rows do not need. If a rank has no room, all ranks raise the same ``HeapError``.
Combine and the backward passes start with their own handshake, read or write rows of peers in place, and end when all
ranks are done. Sums and dot products are computed in the order of the CPU kernels, so the bits are the same.

On a GPU the CPU waits for the counts in dispatch. In other operations it waits until headers are compared, if
``DispatchOptions.checked`` is set. It never waits for rows. Without ``checked`` the next call raises errors of these
operations, and the group is unusable afterwards. The protocol is in csrc/cuda/args.h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from moe_comm.comm.header import DISPATCH_FIXED, Header, describe
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.lending import LendingPrimitives
from moe_comm.dispatch.peer_to_peer.low_latency import (
    LowLatencyBuffers,
    LowLatencyHandle,
    make_buffers,
    send_low_latency,
    sum_low_latency,
)
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation, dense
from moe_comm.dispatch.peer_to_peer.rows import RowFormat
from moe_comm.dispatch.peer_to_peer.streams import record_stream
from moe_comm.dispatch.types import DeviceCounts, Dispatched, DispatchHandle
from moe_comm.dispatch.wire_dtype import UNCHANGED
from moe_comm.errors import ConfigError, HeapError, InputError
from moe_comm.gpu.heap import capturing
from moe_comm.gpu.protocol import SAME, words_address
from moe_comm.runtime.memory import as_tensors


@dataclass(frozen=True, eq=False)
class FixedDispatched:
    """Result of ``dispatch_fixed``. The CPU does not know the numbers of rows.

    Attributes:
        rows_CD: [capacity_rows, D]. Rows from ``ends_E[-1]`` on are not initialised.
        ends_E: [local experts] int32 on the device: end of each expert's rows, as ``torch._grouped_mm`` takes it.
        handle: for ``combine``. Its ``rows_per_expert`` is empty and its ``num_rows`` is the capacity.
    """

    rows_CD: Tensor
    ends_E: Tensor
    handle: DispatchHandle


class PeerToPeerDispatcher(LendingPrimitives):
    """For GPUs of one host with peer access. Construction is collective over ``group``; see the base class."""

    @cached_property
    def _low_latency_buffers(self) -> dict[tuple[int, torch.dtype, int], LowLatencyBuffers]:
        return {}

    def dispatch_fixed(self, x_TD: Tensor, ids_TK: Tensor, *, label: str = "") -> FixedDispatched:
        """Dispatch into a block of ``PeerToPeerOptions.capacity_rows`` rows without CPU synchronization.

        A CUDA graph can capture it. Slots beyond the capacity get no row and add nothing to the output; ``overflow``
        counts them. Shapes are checked here. Values are checked on the device; ``check`` raises errors.

        Args:
            x_TD, ids_TK, label: as in ``dispatch``.

        Raises:
            ConfigError: no ``capacity_rows``, or not known yet.
            InputError, RankMismatch, HeapError: on this rank; on other ranks in ``check``.
                ``dispatch`` on another rank is a mismatch.
        """
        if self.capacity_rows is None:
            raise ConfigError("dispatch_fixed needs PeerToPeerOptions(capacity_rows=...), the same on every rank")
        (x_TD, ids_TK), fault = as_tensors(x=x_TD, ids=ids_TK)
        operation = self.dispatch_operation(x_TD, ids_TK, label, DISPATCH_FIXED, fault=fault)
        counts_E = self._new_counts()
        with self.running(operation):
            dispatched = self.dispatch_by(x_TD, lambda x: self._send_fixed(x, ids_TK, counts_E, strict=False))
        return FixedDispatched(dispatched.rows_RD, counts_E.cumsum(0, dtype=torch.int32), dispatched.handle)

    def keeps_counts(self, x_TD: Tensor) -> bool:
        options = self.options
        return (
            self.peer_options.capacity_rows is not None
            and x_TD.dtype in (torch.bfloat16, torch.float16)
            and options.wire_dtypes == UNCHANGED
            and not options.checksums
            and not self.peer_options.fast_combine
            and min(self.placement.experts_per_rank) > 0
        )

    def dispatch_uncounted(self, x_TD: Tensor, ids_TK: Tensor, label: str) -> Dispatched:
        """Dispatch as ``dispatch_fixed``; more rows than a rank has room for are a fault on every rank."""
        operation = self.dispatch_operation(x_TD, ids_TK, label, DISPATCH_FIXED)
        counts_E = self._new_counts()
        with self.running(operation):
            dispatched = self.dispatch_by(x_TD, lambda x: self._send_fixed(x, ids_TK, counts_E, strict=True), label)
        handle = dispatched.handle
        handle.rows_per_expert = self.counts_of(counts_E, handle.state)  # type: ignore[assignment]
        return dispatched

    def counts_of(self, counts_E: Tensor, place_TK: Tensor) -> DeviceCounts:
        """Return the row counts of this rank's experts, which are on the device. place_TK: of the slots."""
        return DeviceCounts(counts_E, self.check, partial(_dropped, place_TK))

    def low_latency_dispatch(
        self, x_TD: Tensor, ids_TK: Tensor, max_tokens: int, *, label: str = ""
    ) -> LowLatencyHandle:
        """Dispatch at most ``max_tokens`` tokens per rank with one kernel, without backward; see ``low_latency.py``.

        Call ``low_latency_combine`` before any other ``peer_to_peer`` operation of this group. The first call with a
        new ``max_tokens``, width or dtype allocates buffers, which is collective. Ids out of range count as -1.

        Raises:
            ConfigError: ``max_tokens`` out of range.
            InputError: bad shapes, or too many tokens; on this rank only.
            HeapError, RankMismatch: in the first call, on every rank.
        """
        (x_TD, ids_TK), fault = as_tensors(x=x_TD, ids=ids_TK)
        operation = self.dispatch_operation(x_TD, ids_TK, label, fault=fault)
        if operation.fault is not None:
            raise operation.fault
        row_format = self._row_format(x_TD, operation.op)
        x_TD = x_TD.detach()
        x_TD = dense(self._round_rows(x_TD, row_format) if row_format.packing == SAME else x_TD)
        ids_TK = ids_TK.to(torch.int64).contiguous()
        with KernelOperation(self, operation, x_TD, ids_TK):
            buffers = self._buffers_for(row_format, max_tokens, operation)
            sent = send_low_latency(self.memory, buffers, x_TD, ids_TK, operation)
            self.memory.uncombined = describe(operation)
            self._stream.use_by_caller(sent.place_TK)
        return sent

    def low_latency_combine(self, rows_LND: Tensor, weights_TK: Tensor, sent: LowLatencyHandle) -> Tensor:
        """Return [T, D], the weighted sum of each token's expert outputs, in fp32 and in slot order.

        The device waits for the ranks that hold experts of this rank's tokens. It does not wait for other ranks, which
        may be late by up to one dispatch and combine.

        Args:
            rows_LND: outputs of the experts, in the order of ``sent.receive()``. ``sent.results`` avoids a copy.

        Raises:
            InputError: rows or weights of another shape.
            ConfigError: neither ``sent.receive`` nor ``receive_scaled`` was called. This rank could then send rows
                before its peers have received those of this dispatch.
        """
        (rows_LND, weights_TK), fault = as_tensors(rows=rows_LND, weights=weights_TK)
        if fault is not None:
            raise fault
        if rows_LND.shape != sent.results.shape or weights_TK.shape != sent.place_TK.shape:
            raise InputError(
                f"combine needs rows {tuple(sent.results.shape)} and weights {tuple(sent.place_TK.shape)}; got "
                f"{tuple(rows_LND.shape)} and {tuple(weights_TK.shape)}"
            )
        if not sent.has_received:
            raise ConfigError("call sent.receive() before low_latency_combine, also on a rank without experts")
        weights_TK = weights_TK.detach().to(torch.float32).contiguous()
        self.memory.uncombined = ""
        with KernelOperation(self, sent.operation, rows_LND, weights_TK):
            if rows_LND.data_ptr() != sent.results.data_ptr():
                sent.results.copy_(rows_LND.detach())
            y_TD = sum_low_latency(sent, weights_TK, self._blocks)
            if self.memory.emulated:
                self.memory.raise_fault()
            self._stream.use_by_caller(y_TD)
        return y_TD

    def _buffers_for(self, row_format: RowFormat, max_tokens: int, operation: Operation) -> LowLatencyBuffers:
        buffers = self._low_latency_buffers.get((row_format.hidden, row_format.dtype, max_tokens))
        if buffers is None:
            if capturing(self.device):
                what = f"the first low_latency_dispatch of {max_tokens} tokens"
                self._refuse_capture(what, "call it and its combine once before")
            setup = replace(operation, label=f"low latency, {max_tokens} tokens")
            buffers = make_buffers(self.memory, replace(row_format, relay=False), max_tokens, setup)
            self.memory.current = operation
            self._low_latency_buffers[row_format.hidden, row_format.dtype, max_tokens] = buffers
        return buffers

    def check(self) -> None:
        """Wait for all queued operations and raise their errors.

        Raises:
            PeerError: an unchecked operation failed. The group is unusable.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.memory.begin(Header("dispatch", self.num_calls, 0, torch.float32, 1, self.num_experts, False), 0.0)
        self.memory.end()

    @property
    def overflow(self) -> int:
        """Number of this rank's slots beyond the capacity in the last completed ``dispatch_fixed``."""
        return self.memory.operations.report.overflow

    def record_stream(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """Record that ``stream`` uses ``x``, so that its memory is not reused before, as ``Tensor.record_stream``."""
        record_stream(self.memory.operations.heap, x, stream)

    def _send_fixed(
        self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor, *, strict: bool
    ) -> tuple[Tensor, DispatchHandle]:
        """Run ``_send`` with a receive buffer of fixed size, and write the rows of each expert to ``counts_E``.

        strict: whether more rows than there is room for are a fault on every rank.
        """
        if self.context.operation.fault is not None:
            self._refuse()
        operations, row_format = self.memory.operations, self._row_format(x_TD, "dispatch")
        capacity = self.capacity_rows or 0
        x_TD = dense(self._round_rows(x_TD, row_format) if row_format.packing == SAME else x_TD)
        ids_TK = ids_TK.to(torch.int64).contiguous()
        with KernelOperation(self, self.context.operation, x_TD, ids_TK):
            try:
                received = row_format.allocate(operations.heap, capacity)
            except HeapError as problem:
                self._raise_no_room(problem)
            offer = received.offer._replace(room=capacity)
            packed = self.packed(self.context.operation)
            digest_at = words_address(self.plan_digest) if isinstance(self.plan_digest, Tensor) else 0
            how = self._sending(row_format)._replace(
                strict=strict, own_counts_at=words_address(counts_E), digest_at=digest_at
            )
            place_TK = self._move_rows(packed, x_TD, ids_TK, row_format, offer, capacity, how)
            rows_RD = received.rows()
            if self.memory.emulated:
                self.memory.check(ids_TK)
            self._stream.use_by_caller(rows_RD, place_TK, counts_E)
        balanced = ids_TK.numel() // self.world  # an estimate: the CPU may not know the counts
        return rows_RD, self._handle(x_TD, (), rows_RD.shape[0], 0, place_TK, balanced)


def _dropped(place_TK: Tensor) -> int:
    """Return the number of slots without a row."""
    return int((place_TK < 0).sum())
