"""``EventHandle``, ``EventOverlap`` and ``Config`` of DeepEP.

Operations run on the current stream and are queued when they return, so an event marks the current end of that stream.
Without CUDA, an event has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.per_rank import RankExchange
from moe_comm.errors import ConfigError, InputError


@dataclass(frozen=True)
class Config:
    """Sizes of DeepEP's kernels. Accepted and not used."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: buffers are allocated on demand."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0, as ``get_nvl_buffer_size_hint``."""
        return 0


class EventHandle:
    """An event at the current end of the current stream."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event with DeepEP's interface for overlap.

    Attributes:
        event: the event; None if the operation was not asynchronous.
        extra_tensors: kept alive together with the event.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], object] | None = None
        self._release_handle = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event, and call the registered hook once.

        Raises:
            InputError: the operation was not asynchronous, so it has no event.
        """
        if self.event is None:
            raise InputError("this operation has no event to wait for; pass async_finish=True to get one")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call ``hook_after_wait`` in the next ``current_stream_wait``."""
        if self.hook_after_wait is not None:
            raise InputError("this EventOverlap has a hook already")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        self._release_handle = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_handle)
        self._release_handle = False


def finished(asynchronous: bool, *tensors: Any) -> EventOverlap:
    """Return the event of an operation that has been queued."""
    return EventOverlap(EventHandle(), tensors) if asynchronous else EventOverlap()


def wait_for(*events: EventOverlap | EventHandle | None) -> None:
    """Make the current stream wait for the ``previous_event`` arguments of an operation."""
    for event in events:
        handle = event.event if isinstance(event, EventOverlap) else event
        if handle is not None:
            handle.current_stream_wait()


HandleT = TypeVar("HandleT")


def check_handle(handle: Any, kind: type[HandleT]) -> HandleT:
    """Return ``handle``, or raise InputError if it is of another kind."""
    if isinstance(handle, kind):
        return handle
    raise InputError(f"handle must come from dispatch of the same buffer; got {type(handle).__name__}")


def placed(rows_NX: Tensor, place: Tensor, *shape: int) -> Tensor:
    """Return zeros [*shape, X] with ``rows_NX`` at ``place``, an index or a mask. Torch cannot index e4m3."""
    bits_NX = rows_NX.view(torch.uint8) if rows_NX.dtype.itemsize == 1 else rows_NX
    out = bits_NX.new_zeros(*shape, *rows_NX.shape[1:])
    out[place] = bits_NX
    return out.view(rows_NX.dtype)


class GroupBuffer(RankExchange):
    """The part of DeepEP's interface that both buffers share."""

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None:
            raise ConfigError("a deep_ep buffer of moe_comm needs group=, a torch.distributed process group")
        super().__init__(group)

    def destroy(self) -> None:
        """Do nothing: the dispatchers are released with the process group."""

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which all operations run. Needs CUDA."""
        return torch.cuda.current_stream()
