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
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.header import COLLECTIVE, Header, failure, fault_word, other_collective
from moe_comm.dispatch.plain import added_in_order
from moe_comm.errors import HeapError
from moe_comm.runtime.meter import COMMUNICATION
from moe_comm.runtime.shared import DTYPE_CODES, SharedGroup, block, native, warm

Run = Callable[[tuple[Any, ...], int], None]
"""Takes what all calls of the native core begin with, and the address of the result."""

WHOLE_BYTES = 32_768
"""Up to this size every rank adds up a whole all-reduce by itself: the second wait would cost more than the adding."""


class SharedChannel(Channel):
    """A channel whose CPU tensors travel through shared memory once ``share`` has been called on every rank.

    What shared memory cannot take (other devices, unequal splits, a full /dev/shm) goes over the group's backend.
    """

    _shared: SharedGroup | None = None
    _calls = 0
    sharing = True
    """Set alike on every rank: whether to use shared memory where there is some."""
    checked = False
    """Set alike on every rank: whether ``compare`` asks the others where calls are not compared by themselves."""

    def share(self, shared: SharedGroup) -> None:
        """Use ``shared``, which belongs to the same group. Every rank calls this at the same place."""
        self._core = native()
        self._exchange = self._core.Exchange(shared.communicator, torch.get_num_threads())
        self._shared = shared

    def compare(self, doing: str, x: Tensor) -> None:
        """Before a collective of ``x``, if ``checked``: raise ``RankMismatch`` on every rank unless all do this.

        Not where it goes through shared memory, which compares by itself.
        """
        if not self.checked or self._takes(x):
            return
        self._calls += 1
        words = torch.tensor([self._calls, zlib.crc32(doing.encode())])
        told = self.all_gather(words.to(self.control_device), f"the check before {doing}").cpu()
        odd = [rank for rank, row in enumerate(told.tolist()) if row != told[self.rank].tolist()]
        if odd:
            raise other_collective(self.rank, self._calls, doing, f"ranks {odd} are in another")

    def sums(self, x: Tensor) -> bool:
        """As ``Channel.sums``; shared memory adds in fp32, in order of rank, and rounds once."""
        return self._adds(x) or super().sums(x)

    def start_all_gather(self, tensor: Tensor, doing: str) -> Callable[[], Tensor]:
        """As ``Channel.start_all_gather``. Through shared memory it is done at once: copying is work of this core."""

        def gather(offer: tuple[Any, ...], out: int) -> None:
            self._exchange.copy(*offer, 0, tensor.nbytes, out)

        done = self._share(tensor, (self.world, *tensor.shape), gather, doing) if self._takes(tensor) else None
        return super().start_all_gather(tensor, doing) if done is None else lambda: done

    def start_all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], doing: str
    ) -> Callable[[], Tensor]:
        """As ``Channel.start_all_to_all``; done at once too."""

        def swap(offer: tuple[Any, ...], out: int) -> None:
            part = rows.nbytes // self.world
            self._exchange.copy(*offer, self.rank * part, part, out)

        equal = len({*send, *receive}) == 1
        done = self._share(rows, rows.shape, swap, doing) if equal and self._takes(rows) else None
        return super().start_all_to_all(rows, send, receive, doing) if done is None else lambda: done

    def reduce_scatter(self, parts_WTD: Tensor, doing: str) -> Tensor:
        if not self._adds(parts_WTD):
            return super().reduce_scatter(parts_WTD, doing)
        shape = parts_WTD.shape[1:]

        def add(offer: tuple[Any, ...], out: int) -> None:
            count = shape.numel()
            self._exchange.sum(*offer, self.rank * count, count, DTYPE_CODES[parts_WTD.dtype], out)

        done = self._share(parts_WTD, shape, add, doing)
        if done is not None:
            return done
        ones = [1] * self.world  # with the bits that shared memory would have given
        return added_in_order(Channel.start_all_to_all(self, parts_WTD, ones, ones, doing)())

    def all_reduce(self, tensor: Tensor, doing: str) -> Tensor:
        if not self._adds(tensor):
            return super().all_reduce(tensor, doing)

        def add(offer: tuple[Any, ...], out: int) -> None:
            self._exchange.sum(*offer, 0, tensor.numel(), DTYPE_CODES[tensor.dtype], out)

        done = self._share(tensor, tensor.shape, add if tensor.nbytes <= WHOLE_BYTES else None, doing)
        return added_in_order(Channel.start_all_gather(self, tensor, doing)()) if done is None else done

    def _takes(self, x: Tensor) -> bool:
        return self._shared is not None and self.sharing and x.device.type == "cpu" and self.failed is None

    def _adds(self, x: Tensor) -> bool:
        return x.dtype in DTYPE_CODES and self._takes(x)

    def _share(self, x: Tensor, shape: Sequence[int], run: Run | None, doing: str) -> Tensor | None:
        """[*shape] that ``run`` makes of the ranks' ``x``, or, without it, their sum, added up where it is offered.

        None: if a rank has no room for it, all ranks learn so, and go over the backend.
        """
        assert self._shared is not None
        self._calls += 1
        fault: HeapError | None = None
        offer = out = x
        try:
            offer, out = _offer(x, self._shared), _empty(shape, x.dtype)
        except HeapError as error:
            fault = error
        header = Header(COLLECTIVE, self._calls, x.nbytes, x.dtype, 0, 0, False, doing, fault)
        said = (header.compared(), doing, fault_word(fault), str(fault or ""), offer.data_ptr(), offer.nbytes)
        try:
            with COMMUNICATION:
                self._shared.communicator.set_timeout(self.timeout_s)
                if run is not None:
                    run(said, out.data_ptr())
                    return out
                self._exchange.all_sum(*said, DTYPE_CODES[x.dtype])
            # Not the offer itself: who keeps it would fill the shared memory that dispatch needs.
            return out.copy_(offer)
        except self._core.HandshakeFailed as error:
            found = failure(error.headers, self.rank, header)
            if not isinstance(found, HeapError):
                raise found from None
            warnings.warn(
                f"{found}; {doing} goes over the group's backend instead, which is slower. Enlarge /dev/shm "
                "(docker run --shm-size) or set CollectiveOptions(shared_memory=False)",
                RuntimeWarning,
                stacklevel=4,
            )
            return None


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return warm(1, math.prod(shape), dtype).view(tuple(shape))


def _offer(x: Tensor, shared: SharedGroup) -> Tensor:
    """A dense copy of ``x`` where peers can read it."""
    if x.dtype in DTYPE_CODES:
        return block(shared.heap, 1, x.numel(), x.dtype).view(x.shape).copy_(x)
    words = block(shared.heap, 1, -(-x.nbytes // 4), torch.float32).view(-1).view(torch.uint8)
    return words[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
