"""Collectives of torch.distributed with a deadline, and its errors turned into ours.

Tensors travel on the device the group's backend works on and come back on the one they came from: with gloo
CUDA tensors go through host memory. WireDtypes travel as bytes, so the backend need not know their dtype.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from moe_comm.errors import MoeCommError, PeerDied, PeerError, PeerTimeout
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS, moving
from moe_comm.runtime.memory import as_dtype, warm_rows

if TYPE_CHECKING:
    from moe_comm.comm.communicator import Communicator

SLICE_S = 0.5
LINGER_S = 10.0
AT_ONCE_S = 50e-6
"""What was started longer ago than this went on beside other work; its span says when."""
_TIMED_OUT = re.compile("timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile("closed by peer|reset by peer|read error|broken pipe|pair closure|connection|nccl", re.IGNORECASE)


@dataclass(frozen=True)
class PendingTensor:
    """A tensor on its way: calling it waits and gives the tensor; ``ready`` says whether it would not have to wait."""

    take: Callable[[], Tensor]
    ready: Callable[[], bool]

    def __call__(self) -> Tensor:
        return self.take()

    def then(self, change: Callable[[Tensor], Tensor]) -> PendingTensor:
        """What ``change`` makes of it."""
        return PendingTensor(lambda: change(self.take()), self.ready)

    @classmethod
    def here(cls, tensor: Tensor) -> PendingTensor:
        """One that has arrived."""
        return cls(lambda: tensor, lambda: True)


class Channel:
    """Collectives of a communicator's group with one timeout.

    After a ``PeerError`` every call raises that error again: the backend's connections are gone or hold half a
    message, so nothing that came later could be trusted.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self.comm, self.timeout_s = comm, timeout_s
        self.rank, self.world = comm.rank, comm.world

    @property
    def control_device(self) -> torch.device:
        """Where handshakes travel: the host if the backend can, the current CUDA device otherwise."""
        return self.wire(torch.device("cpu"))

    @property
    def rows_device(self) -> torch.device:
        """Where rows of this group most likely are: on CUDA if its backend has NCCL."""
        return torch.device("cuda" if self.comm.backends.get("cuda") == "nccl" else "cpu")

    def wire(self, device: torch.device) -> torch.device:
        """The device on which tensors from ``device`` travel."""
        if device.type == "cuda" and self.comm.backends.get("cuda") == "nccl":
            return device
        if "cpu" in self.comm.backends:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def sums(self, x: Tensor) -> bool:
        """Whether ``all_reduce`` and ``reduce_scatter`` may add up ``x``: as exactly as adding in order of rank in wide
        precision, or as well as it can be had. Gloo rounds a 16-bit float after every addition, and NCCL does."""
        return self.wire(x.device).type == "cuda" and x.dtype in (torch.float32, torch.float64)

    def all_gather(self, tensor: Tensor, description: str) -> Tensor:
        """[W, *shape] of equal-sized tensors, on the device of ``tensor``."""
        return self.start_all_gather(tensor, description)()

    def start_all_gather(self, tensor: Tensor, description: str) -> PendingTensor:
        """Begin ``all_gather``. As with all that is started here, every rank starts the same on this group in the same
        order, and calls what it got in that order too."""
        sent = _as_bytes(tensor.to(self.wire(tensor.device)).contiguous())
        out = warm_rows(1, self.world * sent.numel(), torch.uint8, sent.device).view(-1)
        options = AllgatherOptions()
        options.timeout = self._backend_timeout()
        nbytes = (self.world - 1) * sent.nbytes
        begun = self._start(
            lambda: self.comm.group._allgather_base(out, sent, options), sent.device, description, nbytes
        )
        shape = (self.world, *tensor.shape)
        return begun.then(lambda: out.view(-1).view(tensor.dtype).view(shape).to(tensor.device))

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], description: str) -> Tensor:
        """Rows from every rank in order of rank; ``send`` and ``receive`` are rows per rank, checked beforehand."""
        return self.start_all_to_all(rows, send, receive, description)()

    def start_all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], description: str, out: Tensor | None = None
    ) -> PendingTensor:
        """Begin ``all_to_all``, as ``start_all_gather`` does. out: dense, where what comes lands; of the result's shape
        and dtype, on the device of ``rows``."""
        shape = (sum(receive), *rows.shape[1:])
        width = rows[:1].numel() if rows.shape[0] else torch.Size(rows.shape[1:]).numel()
        if not width:  # on every rank
            return PendingTensor.here(rows.new_empty(shape) if out is None else out)
        sent = as_dtype(torch.uint8, rows.to(self.wire(rows.device)).contiguous().view(rows.shape[0], width))
        home = out if out is not None and out.device == sent.device else None
        if home is not None:
            landing = as_dtype(torch.uint8, home.view(shape[0], width))
        else:
            landing = warm_rows(shape[0], sent.shape[1], torch.uint8, sent.device)
        options = AllToAllOptions()
        options.timeout = self._backend_timeout()
        begun = self._start(
            lambda: self.comm.group.alltoall_base(landing, sent, list(receive), list(send), options),
            sent.device,
            description,
            (sent.shape[0] - send[self.rank]) * sent.shape[1],
        )

        def arrived() -> Tensor:
            if home is not None:
                return home
            found = landing.view(-1).view(rows.dtype).view(shape)
            return found.to(rows.device) if out is None else out.copy_(found)

        return begun.then(arrived)

    def reduce_scatter(self, parts_WTD: Tensor, description: str) -> Tensor:
        """[T, D] sum over ranks of this rank's part, in the dtype of ``parts_WTD``."""
        sent = parts_WTD.to(self.wire(parts_WTD.device)).contiguous()
        out = torch.empty(sent.shape[1:], dtype=sent.dtype, device=sent.device)
        options = ReduceScatterOptions()
        options.timeout = self._backend_timeout()
        self._run(
            lambda: self.comm.group._reduce_scatter_base(out.view(-1), sent.view(-1), options),
            sent.device,
            description,
            (self.world - 1) * out.nbytes,
        )
        return out.to(parts_WTD.device)

    def all_reduce(self, tensor: Tensor, description: str) -> Tensor:
        """Sum over ranks, in the dtype of ``tensor``."""
        out = tensor.to(self.wire(tensor.device)).contiguous().clone()
        options = AllreduceOptions()
        options.timeout = self._backend_timeout()
        nbytes = 2 * (self.world - 1) * out.nbytes // self.world
        self._run(lambda: self.comm.group.allreduce([out], options), out.device, description, nbytes)
        return out.to(tensor.device)

    def rotate(self, tensor: Tensor, description: str, step: int = 1) -> PendingTensor:
        """Start sending ``tensor`` ``step`` ranks on round the ring; what comes is from as many ranks before.

        All ranks' tensors are of one shape and dtype.
        """
        sent = _as_bytes(tensor.to(self.wire(tensor.device)).contiguous())
        send = [sent.numel() if rank == (self.rank + step) % self.world else 0 for rank in range(self.world)]
        receive = [sent.numel() if rank == (self.rank - step) % self.world else 0 for rank in range(self.world)]
        arrived = self.start_all_to_all(sent, send, receive, description)
        return arrived.then(lambda bytes_: bytes_.view(tensor.dtype).view(tensor.shape).to(tensor.device))

    def _backend_timeout(self) -> timedelta:
        # Ours comes first: when the backend's passes it closes its connections, and peers still waiting would
        # take that for a death.
        return timedelta(seconds=self.timeout_s + LINGER_S)

    def _run(self, start: Callable[[], Work], device: torch.device, description: str, nbytes: int) -> None:
        self._start(start, device, description, nbytes).wait()

    def _start(self, start: Callable[[], Work], device: torch.device, description: str, nbytes: int) -> _Begun:
        """The work that ``start`` begins, which sends ``nbytes`` to others. Waiting for it raises its errors, those of
        beginning it too."""
        self.comm.check()
        place = self.comm.next_place()
        started = time.monotonic()
        work: Work | RuntimeError
        try:
            work = start()
        except RuntimeError as error:
            work = error
        return _Begun(work, lambda: self._finish(work, device, description, place, nbytes, started))

    def _finish(
        self,
        work: Work | RuntimeError,
        device: torch.device,
        description: str,
        place: int,
        nbytes: int,
        started: float,
    ) -> None:
        begun = time.monotonic()
        if self.comm.failed is not None:
            raise type(self.comm.failed)(*self.comm.failed.args)
        try:
            if isinstance(work, RuntimeError):
                raise work
            name, group = operation(description), self.comm.span_group
            if device.type == "cuda":
                with EVENTS.span(Kind.COLLECTIVE, name, group=group, nbytes=nbytes):
                    work.wait()  # orders streams; the backend's watchdog holds the deadline
            else:
                with moving(Kind.COLLECTIVE, name, group=group, nbytes=nbytes) as span:
                    if begun - started > AT_ONCE_S:
                        span.put_device(round(started * 1e9), 0)
                    self._wait(work, begun, description, place)
        except MoeCommError:
            raise
        except RuntimeError as error:
            found = self.peer_error(str(error), time.monotonic() - begun, description, place)
            if found is None:
                raise
            self.comm.failed = found
            raise found from error

    def _wait(self, work: Work, begun: float, description: str, place: int) -> None:
        """Wait in slices: between them look whether a peer's process is gone, and say that we wait."""
        noted = False
        while True:
            left = begun + self.timeout_s - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(SLICE_S, left))))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what went wrong, or has just arrived
                    return
            if self.comm.peers is not None and self.comm.peers.ended():
                raise RuntimeError("connection lost: a peer's process has ended")
            if self.comm.peers is not None and (text := self.comm.peers.gave_up()):
                self.comm.failed = PeerError(f"rank {self.rank} in {description}: {text}. This group is unusable.")
                raise self.comm.failed
            if left <= 0:
                raise RuntimeError("timed out")
            if not noted and self.comm.peers is not None:
                self.comm.peers.note(str(place), description)
                noted = True

    def give_up(self, text: str) -> None:
        """Tell the other ranks that this one leaves what is in flight: they raise ``PeerError`` within a second. Over
        NCCL, where no rank looks while it waits, they do so at the deadline."""
        if self.comm.failed is None and not self.comm.calls.gave_up:
            self.comm.calls.gave_up = text
            if self.comm.peers is not None:
                self.comm.peers.give_up(text)

    def peer_error(self, message: str, waited_s: float, description: str, place: int | None = None) -> PeerError | None:
        """Our error for the backend's ``message``; None if it is not about a peer."""
        timed_out, lost = _TIMED_OUT.search(message), _LOST.search(message)
        if not timed_out and not lost:
            return None
        if self.comm.peers is None:
            kind = PeerTimeout if timed_out else PeerDied
            return kind(f"rank {self.rank} in {description} after {waited_s:.1f} s: {message}")
        gone = self.comm.peers.ended()
        if gone:
            who = ", ".join(self.comm.peers.describe(rank) for rank in gone)
            return PeerDied(
                f"rank {self.rank} in {description}: lost {who}. Restart the ranks; this group is unusable."
            )
        where = str(self.comm.places if place is None else place)
        self.comm.peers.note(where, description)
        silent = self.comm.peers.silent(where)
        gone = self.comm.peers.ended()
        who = ", ".join(self.comm.peers.describe(rank) for rank in gone or silent) or "a peer that did not say"
        text = f"rank {self.rank} in {description}: waited {waited_s:.1f} s (timeout {self.timeout_s:g} s) for {who}"
        if gone or not timed_out:
            return PeerDied(f"{text}; the connection was lost ({message}). This group is unusable.")
        return PeerTimeout(
            f"{text}. It is stuck, slow, or took another path through the program; see its stacks (py-spy dump), "
            "or raise DispatchOptions.timeout_s. This group is unusable now."
        )


@dataclass(frozen=True)
class _Begun:
    """Work of the backend, or the error that it began with; ``wait`` ends it."""

    work: Work | RuntimeError
    wait: Callable[[], None]

    def then(self, result: Callable[[], Tensor]) -> PendingTensor:
        def take() -> Tensor:
            self.wait()
            return result()

        return PendingTensor(take, lambda: isinstance(self.work, RuntimeError) or self.work.is_completed())


def operation(description: str) -> str:
    """What is being done, without the call's number and the tensor's shape: one of few names."""
    return description.partition(" of (")[0].partition(" (")[0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return as_dtype(torch.uint8, tensor.view(1, -1)).view(-1)
