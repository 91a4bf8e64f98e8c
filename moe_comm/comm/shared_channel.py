"""Collectives of CPU ranks on one host through shared memory.

A rank copies its tensor once into its heap (the offer). Peers copy or sum their part of it directly into the result.
There are no sockets or kernel buffers. Each call has the same handshake as a dispatch: ranks in different calls raise
``RankMismatch``. csrc/cpu/communicator.h defines the protocol, csrc/cpu/exchange.h the copies.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor, needs_report, operation, raised_text
from moe_comm.comm.header import COLLECTIVE, COLLECTIVES, Header, failure, fault_word, other_collective
from moe_comm.comm.shared_heap import SharedHeap
from moe_comm.errors import HeapError, MoeCommError, PeerRaised, mark_known
from moe_comm.kernels.autograd import sum_in_rank_order
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.memory import DTYPE_CODES, address, block, warm_rows
from moe_comm.runtime.native_core import native

if TYPE_CHECKING:
    from moe_comm._C import Heap

T = TypeVar("T")
Run = Callable[[tuple[Any, ...], int], None]
"""Function of the common arguments of native calls and the address of the result."""

VALUES_BYTES = 16
"""Of ``gather_values``."""
LOCAL_SUM_BYTES = 32_768
"""Up to this size every rank computes all sums of an all-reduce. A second wait would take longer than the sums."""


class SharedChannel(Channel):
    """A channel that transfers CPU tensors through shared memory after ``attach_heap``.

    It uses the group's backend for everything else: other devices, ``all_to_all``, a full /dev/shm.
    ``shared_memory`` and ``checked`` are options that must be equal on all ranks; see ``CollectiveOptions``.
    """

    _shared: SharedHeap | None = None
    shared_memory = True
    checked = False

    def attach_heap(self, shared: SharedHeap) -> None:
        """Use the shared memory of the group. All ranks must call this before the same collective."""
        self._core = native()
        self._threads = torch.get_num_threads()
        self._exchange = self._core.Exchange(shared.communicator, self._threads)
        self._shared = shared

    def close(self) -> None:
        """Drop the reference to the shared memory."""
        self._shared = None

    @property
    def heap(self) -> Heap:
        """This rank's shared memory. Requires ``uses_shared_memory``."""
        assert self._shared is not None
        heap: Heap = self._shared.heap
        return heap

    def compare(self, description: str, x: Tensor) -> None:
        """Raise ``RankMismatch`` on every rank unless all are about to call the same collective, if ``checked``.

        Calls through shared memory are not compared here, because they always compare.
        """
        if not self.checked or self.uses_shared_memory(x):
            return
        call = self.comm.calls.next(COLLECTIVES)
        words = torch.tensor([call, zlib.crc32(description.encode())], dtype=torch.int64, device="cpu")
        rows = self.all_gather(words.to(self.control_device), f"the check before {description}").cpu()
        different = [rank for rank, row in enumerate(rows.tolist()) if row != rows[self.rank].tolist()]
        if different:
            error = other_collective(self.rank, call, description, f"ranks {different} are in another")
            mark_known(error, self.comm)
            raise error

    def compare_before_transfer(self, description: str, x: Tensor) -> None:
        """As ``compare``, for transfers without a comparison of their own (``rotate``).

        With shared memory calls are always compared, otherwise if ``checked``.
        """
        if self.uses_shared_memory(x):
            self.all_gather(torch.zeros(1, dtype=torch.float32, device="cpu"), description)
        else:
            self.compare(description, x)

    def can_sum(self, x: Tensor) -> bool:
        """See ``Channel.can_sum``. Shared memory sums in fp32, in order of rank, and rounds once."""
        return self.can_sum_in_memory(x) or super().can_sum(x)

    def gather_values(self, values: tuple[int, int], description: str) -> list[list[int]]:
        """See ``Channel.gather_values``. Through shared memory the values need no block of the heap."""
        if not self._uses_shared_memory("cpu") or "cpu" not in self.comm.backends:
            return super().gather_values(values, description)
        header = self._header(VALUES_BYTES, torch.int64, description, None)
        nbytes = (self.world - 1) * VALUES_BYTES
        try:
            with communication_span(Kind.COLLECTIVE, operation(description), group=self.comm.span_group, nbytes=nbytes):
                rows: list[list[int]] = self._exchange.values(header.compared(), description, values)
                return rows
        except self._core.HandshakeFailed as mismatch:
            error = failure(mismatch.headers, self.rank, header)
            mark_known(error, self.comm)
            raise error from None

    def start_all_gather(self, tensor: Tensor, description: str) -> PendingTensor:
        """See ``Channel.start_all_gather``. Through shared memory it completes immediately."""

        def gather(args: tuple[Any, ...], out: int) -> None:
            self._exchange.copy(*args, 0, tensor.nbytes, out)

        shape, nbytes = (self.world, *tensor.shape), (self.world - 1) * tensor.nbytes
        result = self._exchange_shared(tensor, shape, gather, description, nbytes)
        return super().start_all_gather(tensor, description) if result is None else PendingTensor.completed(result)

    def start_swap(self, parts_W: Tensor, description: str) -> PendingTensor:
        """See ``Channel.start_swap``. Through shared memory it completes immediately."""
        part_bytes = parts_W.nbytes // self.world

        def swap(args: tuple[Any, ...], out: int) -> None:
            self._exchange.copy(*args, self.rank * part_bytes, part_bytes, out)

        nbytes = part_bytes * (self.world - 1)
        result = self._exchange_shared(parts_W, parts_W.shape, swap, description, nbytes)
        return super().start_swap(parts_W, description) if result is None else PendingTensor.completed(result)

    def reduce_scatter(self, parts_WTD: Tensor, description: str) -> Tensor:
        if not self.can_sum_in_memory(parts_WTD):
            return super().reduce_scatter(parts_WTD, description)
        shape = parts_WTD.shape[1:]

        def add(args: tuple[Any, ...], out: int) -> None:
            count = shape.numel()
            self._exchange.sum(*args, self.rank * count, count, DTYPE_CODES[parts_WTD.dtype], out)

        nbytes = parts_WTD.nbytes // self.world * (self.world - 1)
        result = self._exchange_shared(parts_WTD, shape, add, description, nbytes)
        if result is not None:
            return result
        # A rank has no room. Gather and sum in rank order, which gives the same bits as shared memory.
        return sum_in_rank_order(Channel.start_swap(self, parts_WTD, description)())

    def all_reduce(self, tensor: Tensor, description: str) -> Tensor:
        if not self.can_sum_in_memory(tensor):
            return super().all_reduce(tensor, description)

        def add(args: tuple[Any, ...], out: int) -> None:
            self._exchange.sum(*args, 0, tensor.numel(), DTYPE_CODES[tensor.dtype], out)

        local = tensor.nbytes <= LOCAL_SUM_BYTES
        nbytes = (self.world - 1) * tensor.nbytes if local else 2 * (self.world - 1) * tensor.nbytes // self.world
        result = self._exchange_shared(tensor, tensor.shape, add if local else None, description, nbytes)
        if result is not None:
            return result
        return sum_in_rank_order(Channel.start_all_gather(self, tensor, description)())

    def can_sum_in_memory(self, x: Tensor) -> bool:
        """Return whether shared memory can sum tensors like ``x``. Equal on all ranks if the dtype of ``x`` is."""
        return x.dtype in DTYPE_CODES and self.uses_shared_memory(x)

    def rendezvous(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        description: str,
        offer: Callable[[Heap], Tensor],
        body: Callable[[Any], T],
    ) -> T | None:
        """Run ``body`` with the native core's ``Rendezvous``: peers access this rank's memory while it computes.

        Requires ``can_sum_in_memory``.

        Args:
            num_bytes, dtype, description: compared between ranks.
            offer: allocates the block that peers can read, and writes what is available at the start.
            body: requests the block of each peer. It must not keep memory of peers. It must be repeatable, because the
                caller computes the result in another way if this method returns None.

        Returns:
            The result of ``body``; None on every rank if a rank has no room for its block.
        """
        assert self._shared is not None
        fault: HeapError | None = None
        block_ = torch.empty(0, dtype=dtype, device="cpu")
        try:
            block_ = offer(self._shared.heap)
        except HeapError as error:
            fault = error.with_traceback(None)
        header, args = self._call_args(num_bytes, dtype, description, block_, fault)
        rendezvous = None
        group = self.comm.span_group
        try:
            with communication_span(Kind.COLLECTIVE, operation(description), group=group, nbytes=num_bytes):
                rendezvous = self._core.Rendezvous(self._shared.communicator, self._threads, *args)
            result = body(rendezvous)
            with communication_span(Kind.COLLECTIVE, "wait until all ranks have finished"):
                rendezvous.finish()
            return result
        except self._core.HandshakeFailed as error:
            self._warn_no_room(error, header, "uses another method")
            return None
        finally:
            if rendezvous is not None:
                rendezvous.abandon()  # has no effect after finish

    def abort(self, error: Exception, label: str, *, in_flight: bool = False) -> None:
        """Report to the other ranks that this rank raised ``error`` instead of its next collective.

        With shared memory, they raise ``PeerRaised`` from their current or next collective, for which this call waits
        for at most ``timeout_s``. Otherwise those that wait raise ``PeerError``, and the group is unusable. Nothing
        happens if an operation raised ``error`` on all ranks, and over NCCL, where waiting ranks read no reports.

        Args:
            label: name of the layer.
            in_flight: this rank, or a peer, may be in a transfer of the group's backend.
        """
        if self.world == 1 or not needs_report(error, self.comm) or self.rows_device.type == "cuda":
            return
        self.comm.check()
        if self.comm.core is not None:
            self.comm.core.check_peers()
        mark_known(error, self.comm)
        text, empty = raised_text(error, label), torch.empty(0, dtype=torch.float32, device="cpu")
        if in_flight or not self.uses_shared_memory(empty):
            self.give_up(f"rank {self.rank} {text}")
            return
        header, args = self._call_args(0, empty.dtype, label, empty, PeerRaised(text))
        try:
            self._exchange.copy(*args, 0, 0, 0)
        except self._core.HandshakeFailed as mismatch:
            failure(mismatch.headers, self.rank, header)  # updates the numbers of calls

    def reserve(self, num_bytes: int) -> None:
        """Grow the shared memory of this rank so that it has a free block of ``num_bytes``. Not collective.

        New pages take several times as long as the copy of their bytes, so a later call that offers such a block is
        faster. Nothing happens without shared memory, or without room.
        """
        if self._shared is not None and self.shared_memory:
            with suppress(HeapError):
                block(self._shared.heap, 1, -(-num_bytes // 4), torch.float32)

    def uses_shared_memory(self, x: Tensor) -> bool:
        """Return whether tensors on the device of ``x`` are transferred through shared memory. Equal on all ranks."""
        return self._uses_shared_memory(x.device.type)

    def _uses_shared_memory(self, device_type: str) -> bool:
        return self._shared is not None and self.shared_memory and device_type == "cpu" and self.comm.failed is None

    def _exchange_shared(
        self, x: Tensor, shape: Sequence[int], run: Run | None, description: str, nbytes: int
    ) -> Tensor | None:
        """Run a collective in shared memory. Return its result; None on every rank if it has no room or is not used.

        Args:
            run: computes the result of ``shape``; None for an all-reduce in place.
            nbytes: bytes of ``x`` that peers read.
        """
        if not self.uses_shared_memory(x):
            return None
        assert self._shared is not None
        fault: HeapError | None = None
        offer = out = x
        try:
            offer, out = _offer(x, self._shared), _empty(shape, x.dtype)
        except HeapError as error:
            fault = error.with_traceback(None)  # the traceback references ``x``
        header, args = self._call_args(x.nbytes, x.dtype, description, offer, fault)
        try:
            with communication_span(Kind.COLLECTIVE, operation(description), group=self.comm.span_group, nbytes=nbytes):
                if run is not None:
                    run(args, address(out, x.dtype))
                    return out
                self._exchange.all_sum(*args, DTYPE_CODES[x.dtype])
            # Return a copy, because the offer occupies shared memory that dispatch needs.
            return out.copy_(offer)
        except self._core.HandshakeFailed as error:
            self._warn_no_room(error, header, "uses the group's backend")
            return None

    def _call_args(
        self, num_bytes: int, dtype: torch.dtype, description: str, offer: Tensor, fault: MoeCommError | None
    ) -> tuple[Header, tuple[Any, ...]]:
        """Return the header of the next call, and the common arguments of native calls."""
        header = self._header(num_bytes, dtype, description, fault)
        return header, (
            header.compared(),
            description,
            fault_word(fault),
            str(fault or ""),
            address(offer, offer.dtype),
            offer.nbytes,
        )

    def _header(self, num_bytes: int, dtype: torch.dtype, description: str, fault: MoeCommError | None) -> Header:
        """Return the header of the next call."""
        call = self.comm.calls.next(COLLECTIVES)
        self.comm.set_core_timeout(self.timeout_s)
        return Header(COLLECTIVE, call, num_bytes, dtype, 0, 0, False, description, fault, calls=self.comm.calls)

    def _warn_no_room(self, handshake_error: Any, header: Header, fallback: str) -> None:
        """Raise the error of a failed handshake. If a rank has no room, only warn that the caller uses ``fallback``."""
        error = failure(handshake_error.headers, self.rank, header)
        text = str(error)
        try:
            if not isinstance(error, HeapError):
                mark_known(error, self.comm)
                raise error from None
        finally:
            del error, handshake_error  # their tracebacks reference this frame and memory of the heap
        warnings.warn(
            f"{text}; {header.label} {fallback} instead, which is slower. Enlarge /dev/shm "
            "(docker run --shm-size) or set CollectiveOptions(shared_memory=False)",
            RuntimeWarning,
            stacklevel=5,
        )


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return warm_rows(1, math.prod(shape), dtype, torch.device("cpu")).view(tuple(shape))


def _offer(x: Tensor, shared: SharedHeap) -> Tensor:
    """Return a dense copy of ``x`` in memory that peers can read."""
    if x.dtype in DTYPE_CODES:
        return block(shared.heap, 1, x.numel(), x.dtype).view(x.shape).copy_(x)
    words = block(shared.heap, 1, -(-x.nbytes // 4), torch.float32).view(-1).view(torch.uint8)
    return words[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
