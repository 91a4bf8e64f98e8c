"""Collectives of CPU ranks on one host through shared memory: peers read a rank's tensor where it stands.

A tensor is copied once into its rank's heap; from there each peer takes its share straight into the result. There are
no sockets and no kernel buffers in between, and every call carries the handshake of a dispatch: ranks that are in
different calls get ``RankMismatch``. The protocol is in csrc/cpu/communicator.h, the copying in csrc/cpu/exchange.h.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor, operation
from moe_comm.comm.header import COLLECTIVE, COLLECTIVES, Header, failure, fault_word, other_collective
from moe_comm.comm.shared_heap import SharedHeap
from moe_comm.errors import HeapError
from moe_comm.kernels.wide import added_in_order
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving
from moe_comm.runtime.memory import DTYPE_CODES, block, native, warm_rows

if TYPE_CHECKING:
    from moe_comm._C import Heap

T = TypeVar("T")
Run = Callable[[tuple[Any, ...], int], None]
"""Takes what all calls of the native core begin with, and the address of the result."""

WHOLE_BYTES = 32_768
"""Up to this size every rank adds up a whole all-reduce by itself: the second wait would cost more than the adding."""


class SharedChannel(Channel):
    """A channel whose CPU tensors travel through shared memory once ``share`` has been called on every rank.

    What shared memory cannot take (other devices, unequal splits, a full /dev/shm) goes over the group's backend.
    """

    _shared: SharedHeap | None = None
    sharing = True
    """Set alike on every rank: whether to use shared memory where there is some."""
    checked = False
    """Set alike on every rank: whether ``compare`` asks the others where calls are not compared by themselves."""

    def share(self, shared: SharedHeap) -> None:
        """Use ``shared``, which belongs to the same group. Every rank calls this at the same place."""
        self._core = native()
        self._threads = torch.get_num_threads()
        self._exchange = self._core.Exchange(shared.communicator, self._threads)
        self._shared = shared

    def close(self) -> None:
        """Let go of the shared memory."""
        self._shared = None

    def compare(self, description: str, x: Tensor) -> None:
        """Before a collective of ``x``, if ``checked``: raise ``RankMismatch`` on every rank unless all do this.

        Not where it goes through shared memory, which compares by itself.
        """
        if not self.checked or self._takes(x):
            return
        call = self.comm.calls.next(COLLECTIVES)
        words = torch.tensor([call, zlib.crc32(description.encode())])
        told = self.all_gather(words.to(self.control_device), f"the check before {description}").cpu()
        odd = [rank for rank, row in enumerate(told.tolist()) if row != told[self.rank].tolist()]
        if odd:
            raise other_collective(self.rank, call, description, f"ranks {odd} are in another")

    def agree(self, description: str, x: Tensor) -> None:
        """As ``compare``, before transfers that never compare by themselves (``rotate``): through shared memory where
        there is some, else if ``checked``."""
        if self._takes(x):
            self.all_gather(torch.zeros(1), description)
        else:
            self.compare(description, x)

    def sums(self, x: Tensor) -> bool:
        """As ``Channel.sums``; shared memory adds in fp32, in order of rank, and rounds once."""
        return self.adds(x) or super().sums(x)

    def start_all_gather(self, tensor: Tensor, description: str) -> PendingTensor:
        """As ``Channel.start_all_gather``. Through shared memory it is done at once: copying is work of this core."""

        def gather(offer: tuple[Any, ...], out: int) -> None:
            self._exchange.copy(*offer, 0, tensor.nbytes, out)

        shape, nbytes = (self.world, *tensor.shape), (self.world - 1) * tensor.nbytes
        done = self._share(tensor, shape, gather, description, nbytes) if self._takes(tensor) else None
        return super().start_all_gather(tensor, description) if done is None else PendingTensor.here(done)

    def start_all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], description: str, out: Tensor | None = None
    ) -> PendingTensor:
        """As ``Channel.start_all_to_all``; done at once too."""

        def swap(offer: tuple[Any, ...], at: int) -> None:
            part = rows.nbytes // self.world
            self._exchange.copy(*offer, self.rank * part, part, at)

        equal = len({*send, *receive}) == 1
        nbytes = rows.nbytes // self.world * (self.world - 1)
        done = self._share(rows, rows.shape, swap, description, nbytes) if equal and self._takes(rows) else None
        if done is None:
            return super().start_all_to_all(rows, send, receive, description, out)
        return PendingTensor.here(done if out is None else out.copy_(done))

    def reduce_scatter(self, parts_WTD: Tensor, description: str) -> Tensor:
        if not self.adds(parts_WTD):
            return super().reduce_scatter(parts_WTD, description)
        shape = parts_WTD.shape[1:]

        def add(offer: tuple[Any, ...], out: int) -> None:
            count = shape.numel()
            self._exchange.sum(*offer, self.rank * count, count, DTYPE_CODES[parts_WTD.dtype], out)

        done = self._share(parts_WTD, shape, add, description, parts_WTD.nbytes // self.world * (self.world - 1))
        if done is not None:
            return done
        ones = [1] * self.world  # with the bits that shared memory would have given
        return added_in_order(Channel.start_all_to_all(self, parts_WTD, ones, ones, description)())

    def all_reduce(self, tensor: Tensor, description: str) -> Tensor:
        if not self.adds(tensor):
            return super().all_reduce(tensor, description)

        def add(offer: tuple[Any, ...], out: int) -> None:
            self._exchange.sum(*offer, 0, tensor.numel(), DTYPE_CODES[tensor.dtype], out)

        whole = tensor.nbytes <= WHOLE_BYTES
        nbytes = (self.world - 1) * tensor.nbytes if whole else 2 * (self.world - 1) * tensor.nbytes // self.world
        done = self._share(tensor, tensor.shape, add if whole else None, description, nbytes)
        return added_in_order(Channel.start_all_gather(self, tensor, description)()) if done is None else done

    def adds(self, x: Tensor) -> bool:
        """Whether tensors like ``x`` travel through shared memory and can be added up there; alike on every rank whose
        ``x`` has the same dtype."""
        return x.dtype in DTYPE_CODES and self._takes(x)

    def meet(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        description: str,
        offer: Callable[[Heap], Tensor],
        body: Callable[[Any], T],
    ) -> T | None:
        """One operation in which peers come while this rank computes: ``body`` runs with the native core's
        ``Rendezvous``. Only where ``adds`` says so.

        Args:
            num_bytes, dtype, description: what ranks must agree on.
            offer: makes the block that this rank offers, with what can be read at once in it.
            body: must be able to run again in another way; asks for each peer, and keeps no peer's memory.

        Returns:
            What ``body`` returns; None if a rank has no room for its offer. All ranks learn so.

        Raises:
            RankMismatch: on every rank. PeerDied, PeerTimeout: a rank is gone or stuck. PeerError: it failed in its
            ``body``, as the peers of this rank get if this ``body`` raises anything.
        """
        assert self._shared is not None
        fault: HeapError | None = None
        offered = torch.empty(0, dtype=dtype)
        try:
            offered = offer(self._shared.heap)
        except HeapError as error:
            fault = error.with_traceback(None)
        header, said = self._say(num_bytes, dtype, description, offered, fault)
        rendezvous = None
        try:
            with moving(Kind.COLLECTIVE, operation(description), group=self.comm.span_group, nbytes=num_bytes):
                rendezvous = self._core.Rendezvous(self._shared.communicator, self._threads, *said)
            result = body(rendezvous)
            with moving(Kind.COLLECTIVE, "the end of others"):
                rendezvous.finish()
            return result
        except self._core.HandshakeFailed as error:
            self._no_room(error, header, "another way")
            return None
        finally:
            if rendezvous is not None:
                rendezvous.abandon()  # does nothing once it is finished

    def _takes(self, x: Tensor) -> bool:
        return self._shared is not None and self.sharing and x.device.type == "cpu" and self.comm.failed is None

    def _share(self, x: Tensor, shape: Sequence[int], run: Run | None, description: str, nbytes: int) -> Tensor | None:
        """[*shape] that ``run`` makes of the ranks' ``x``, or, without it, their sum, added up where it is offered.
        Others read ``nbytes`` of it.

        None: if a rank has no room for it, all ranks learn so, and go over the backend.
        """
        assert self._shared is not None
        fault: HeapError | None = None
        offer = out = x
        try:
            offer, out = _offer(x, self._shared), _empty(shape, x.dtype)
        except HeapError as error:
            fault = error.with_traceback(None)  # which holds ``x``
        header, said = self._say(x.nbytes, x.dtype, description, offer, fault)
        try:
            with moving(Kind.COLLECTIVE, operation(description), group=self.comm.span_group, nbytes=nbytes):
                if run is not None:
                    run(said, out.data_ptr())
                    return out
                self._exchange.all_sum(*said, DTYPE_CODES[x.dtype])
            # Not the offer itself: who keeps it would fill the shared memory that dispatch needs.
            return out.copy_(offer)
        except self._core.HandshakeFailed as error:
            self._no_room(error, header, "over the group's backend")
            return None

    def _say(
        self, num_bytes: int, dtype: torch.dtype, description: str, offer: Tensor, fault: HeapError | None
    ) -> tuple[Header, tuple[Any, ...]]:
        """The next call's header, and what all calls of the native core begin with."""
        assert self._shared is not None
        call = self.comm.calls.next(COLLECTIVES)
        self.comm.limit(self.timeout_s)
        header = Header(COLLECTIVE, call, num_bytes, dtype, 0, 0, False, description, fault, calls=self.comm.calls)
        return header, (
            header.compared(),
            description,
            fault_word(fault),
            str(fault or ""),
            offer.data_ptr(),
            offer.nbytes,
        )

    def _no_room(self, error: Any, header: Header, instead: str) -> None:
        """Raise what made the handshake fail, but if a rank has no room: that only warns."""
        found = failure(error.headers, self.rank, header)
        said = str(found)
        try:
            if not isinstance(found, HeapError):
                raise found from None
        finally:
            del found, error  # their tracebacks have this frame and, below it, what stands in the heap
        warnings.warn(
            f"{said}; {header.label} goes {instead} instead, which is slower. Enlarge /dev/shm "
            "(docker run --shm-size) or set CollectiveOptions(shared_memory=False)",
            RuntimeWarning,
            stacklevel=5,
        )


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return warm_rows(1, math.prod(shape), dtype, torch.device("cpu")).view(tuple(shape))


def _offer(x: Tensor, shared: SharedHeap) -> Tensor:
    """A dense copy of ``x`` where peers can read it."""
    if x.dtype in DTYPE_CODES:
        return block(shared.heap, 1, x.numel(), x.dtype).view(x.shape).copy_(x)
    words = block(shared.heap, 1, -(-x.nbytes // 4), torch.float32).view(-1).view(torch.uint8)
    return words[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
