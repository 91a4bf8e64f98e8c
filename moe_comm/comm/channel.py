"""Collectives of torch.distributed with a deadline and typed errors.

Tensors are transferred on a device that the group's backend supports, and returned on their own device. With gloo, CUDA
tensors are copied through CPU memory. Rows are transferred as bytes, so the backend need not support their dtype.

Operations of a group raise ``PeerDied`` or ``PeerTimeout`` if a rank is lost, ``PeerError`` if a rank gave up or the
group is unusable since an earlier error, ``ConfigError`` after the group was destroyed, and, where calls are compared,
``RankMismatch`` on every rank if ranks are in different calls.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.utils.checkpoint import _StopRecomputationError  # no public name

from moe_comm.errors import ANY, MoeCommError, PeerDied, PeerError, PeerTimeout, known_to_peers
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS, communication_span
from moe_comm.runtime.memory import as_dtype, materialized, warm_rows

if TYPE_CHECKING:
    from moe_comm.comm.communicator import Communicator

SLICE_S = 0.25
"""Interval at which a waiting rank checks whether its peers are alive."""
LINGER_S = 10.0
"""By how much the backend's timeout exceeds the channel's; see ``_timed``."""
AT_ONCE_S = 50e-6
"""Operations that were started longer ago than this when the wait begins ran concurrently with other work. Their span
records the start."""
MESSAGE_CHARS = 160
"""Length limit for the text of an exception in a header."""
SAME_CALLS = "All ranks must call a layer equally often, also in generate and evaluation"
_TIMED_OUT = re.compile("timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile("closed by peer|reset by peer|read error|broken pipe|pair closure|connection|nccl", re.IGNORECASE)


@dataclass(frozen=True)
class PendingTensor:
    """A tensor in flight. Calling it waits for the tensor and returns it. ``ready()``: whether it is complete."""

    wait: Callable[[], Tensor]
    ready: Callable[[], bool]

    def __call__(self) -> Tensor:
        return self.wait()

    def then(self, change: Callable[[Tensor], Tensor]) -> PendingTensor:
        """Return a pending tensor with ``change`` applied to the result."""
        return PendingTensor(lambda: change(self.wait()), self.ready)

    @classmethod
    def completed(cls, tensor: Tensor) -> PendingTensor:
        """Return a pending tensor that is complete."""
        return cls(lambda: tensor, lambda: True)


class Channel:
    """Collectives of a communicator's group with one timeout.

    After a ``PeerError`` every call raises that error again: the backend's connections are closed or contain part of a
    message, so later results would be invalid.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self.comm, self.timeout_s = comm, timeout_s
        self.rank, self.world = comm.rank, comm.world

    @property
    def control_device(self) -> torch.device:
        """Device of handshakes: the CPU if the backend supports it, else the current CUDA device."""
        return self.transfer_device(torch.device("cpu"))

    @property
    def rows_device(self) -> torch.device:
        """Default device of rows: CUDA if the backend is NCCL, else the CPU."""
        return torch.device("cuda" if self.comm.backends.get("cuda") == "nccl" else "cpu")

    def transfer_device(self, device: torch.device) -> torch.device:
        """Return the device on which tensors from ``device`` are transferred."""
        if device.type == "cuda" and self.comm.backends.get("cuda") == "nccl":
            return device
        if "cpu" in self.comm.backends:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def can_sum(self, x: Tensor) -> bool:
        """Return whether ``all_reduce`` and ``reduce_scatter`` are precise enough for ``x``.

        Gloo and NCCL round 16-bit floats after each addition.
        """
        return self.transfer_device(x.device).type == "cuda" and x.dtype in (torch.float32, torch.float64)

    def all_gather(self, tensor: Tensor, description: str) -> Tensor:
        """Return [W, *shape], the tensors of all ranks, on the device of ``tensor``. They must have equal sizes."""
        return self.start_all_gather(tensor, description)()

    def gather_values(self, values: tuple[int, int], description: str) -> list[list[int]]:
        """Return the values of all ranks. A rank may return before the others have read its values."""
        sent = torch.tensor(values, dtype=torch.int64, device=self.control_device)
        rows: list[list[int]] = self.all_gather(sent, description).tolist()
        return rows

    def start_all_gather(self, tensor: Tensor, description: str) -> PendingTensor:
        """Start ``all_gather``.

        All ranks must start the same operations of a group in the same order, and wait for them in that order.
        """
        tensor = materialized(tensor)
        sent = _as_bytes(tensor.to(self.transfer_device(tensor.device)).contiguous())
        out = warm_rows(1, self.world * sent.numel(), torch.uint8, sent.device).view(-1)
        options = self._timed(AllgatherOptions())
        nbytes = (self.world - 1) * sent.nbytes
        pending = self._start(out, lambda: self.comm.group._allgather_base(out, sent, options), description, nbytes)
        shape = (self.world, *tensor.shape)
        return pending.then(lambda out: out.view(-1).view(tensor.dtype).view(shape).to(tensor.device))

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], description: str) -> Tensor:
        """Return the rows from all ranks, in order of rank.

        Args:
            send, receive: number of rows to and from each rank. ``send[r]`` must equal this rank's entry in the
                ``receive`` of rank r.
        """
        return self.start_all_to_all(rows, send, receive, description)()

    def start_all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], description: str, out: Tensor | None = None
    ) -> PendingTensor:
        """Start ``all_to_all``; see ``start_all_gather``.

        Args:
            out: dense destination with the shape, dtype and device of the result; default: a new tensor.
        """
        rows = materialized(rows)
        shape = (sum(receive), *rows.shape[1:])
        width = rows[:1].numel() if rows.shape[0] else torch.Size(rows.shape[1:]).numel()
        if not width:  # rows have no elements; the width is equal on all ranks, so none calls the backend
            return PendingTensor.completed(rows.new_empty(shape) if out is None else out)
        sent = as_dtype(torch.uint8, rows.to(self.transfer_device(rows.device)).contiguous().view(rows.shape[0], width))
        direct = out if out is not None and out.device == sent.device else None
        if direct is not None:
            received = as_dtype(torch.uint8, direct.view(shape[0], width))
        else:
            received = warm_rows(shape[0], sent.shape[1], torch.uint8, sent.device)
        options = self._timed(AllToAllOptions())
        pending = self._start(
            received,
            lambda: self.comm.group.alltoall_base(received, sent, list(receive), list(send), options),
            description,
            (sent.shape[0] - send[self.rank]) * sent.shape[1],
        )

        def result(received: Tensor) -> Tensor:
            if direct is not None:
                return direct
            tensor = received.view(-1).view(rows.dtype).view(shape)
            return tensor.to(rows.device) if out is None else out.copy_(tensor)

        return pending.then(result)

    def swap(self, parts_W: Tensor, description: str) -> Tensor:
        """All-to-all of equal parts: return [W, *shape], this rank's part from each rank.

        Args:
            parts_W: [W, *shape], the part of each rank. All ranks must have equal shapes.
        """
        return self.start_swap(parts_W, description)()

    def start_swap(self, parts_W: Tensor, description: str) -> PendingTensor:
        """Start ``swap``; see ``start_all_gather``."""
        ones = [1] * self.world
        return self.start_all_to_all(parts_W, ones, ones, description)

    def reduce_scatter(self, parts_WTD: Tensor, description: str) -> Tensor:
        """Return [T, D], the sum over ranks of this rank's part, in the dtype of ``parts_WTD``."""
        sent = materialized(parts_WTD).to(self.transfer_device(parts_WTD.device)).contiguous()
        out = torch.empty(sent.shape[1:], dtype=sent.dtype, device=sent.device)
        options = self._timed(ReduceScatterOptions())
        nbytes = (self.world - 1) * out.nbytes
        group = self.comm.group
        pending = self._start(
            out, lambda: group._reduce_scatter_base(out.view(-1), sent.view(-1), options), description, nbytes
        )
        return pending().to(parts_WTD.device)

    def all_reduce(self, tensor: Tensor, description: str) -> Tensor:
        """Return the sum over ranks, in the dtype of ``tensor``."""
        out = materialized(tensor).to(self.transfer_device(tensor.device)).contiguous().clone()
        options = self._timed(AllreduceOptions())
        nbytes = 2 * (self.world - 1) * out.nbytes // self.world
        return self._start(out, lambda: self.comm.group.allreduce([out], options), description, nbytes)().to(
            tensor.device
        )

    def rotate(self, tensor: Tensor, description: str, step: int = 1) -> PendingTensor:
        """Start sending ``tensor`` to rank + ``step`` on the ring, and receiving from rank - ``step``.

        The tensors of all ranks must have the same shape and dtype.
        """
        tensor = materialized(tensor)
        to_rank, from_rank = ((self.rank + sign * step) % self.world for sign in (1, -1))
        flat = _as_bytes(tensor.contiguous())
        pending = self.send_receive(flat, to_rank, from_rank, flat.numel(), description)
        return pending.then(lambda bytes_: bytes_.view(tensor.dtype).view(tensor.shape))

    def send_receive(
        self, bytes_: Tensor, to_rank: int, from_rank: int, received: int, description: str
    ) -> PendingTensor:
        """Start sending uint8 ``bytes_`` [N] to one rank, and receiving [``received``] from another one.

        Each rank sends to one rank and receives from one. Sizes may differ and be 0. Collective.
        """
        sent = bytes_.to(self.transfer_device(bytes_.device))
        send = [sent.numel() if rank == to_rank else 0 for rank in range(self.world)]
        receive = [received if rank == from_rank else 0 for rank in range(self.world)]
        return self.start_all_to_all(sent, send, receive, description).then(lambda out: out.to(bytes_.device))

    def _timed(self, options: Any) -> Any:
        """Set the backend's timeout, which is longer than this channel's.

        The backend closes its connections at its timeout, which waiting peers would report as a dead rank.
        """
        options.timeout = timedelta(seconds=self.timeout_s + LINGER_S)
        return options

    def _start(self, out: Tensor, start: Callable[[], Work], description: str, nbytes: int) -> PendingTensor:
        """Start an operation that sends ``nbytes`` and writes ``out``. Waiting for it raises all its errors."""
        self.comm.check()
        number, started = self.comm.next_operation(), time.monotonic()
        work: Work | RuntimeError
        try:
            work = start()
        except RuntimeError as error:
            work = error

        def wait() -> Tensor:
            wait_start = time.monotonic()
            if self.comm.failed is not None:
                raise type(self.comm.failed)(*self.comm.failed.args)
            try:
                if isinstance(work, RuntimeError):
                    raise work
                name, group = operation(description), self.comm.span_group
                if out.is_cuda:
                    with EVENTS.span(Kind.COLLECTIVE, name, group=group, nbytes=nbytes):
                        work.wait()  # orders streams; the backend's watchdog enforces the deadline
                else:
                    with communication_span(Kind.COLLECTIVE, name, group=group, nbytes=nbytes) as span:
                        if wait_start - started > AT_ONCE_S:
                            span.put_device(round(started * 1e9), 0)
                        self._wait(work, wait_start, description, number)
                return out
            except MoeCommError:
                raise
            except RuntimeError as error:
                peer_error = self.peer_error(str(error), time.monotonic() - wait_start, description, number)
                if peer_error is None:
                    raise
                self.comm.failed = peer_error
                raise peer_error from error

        return PendingTensor(wait, lambda: isinstance(work, RuntimeError) or work.is_completed())

    def _wait(self, work: Work, wait_start: float, description: str, number: int) -> None:
        """Wait in slices. Between slices check whether a peer has ended or given up, and note that this rank waits."""
        noted = False
        while True:
            remaining_s = wait_start + self.timeout_s - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(SLICE_S, remaining_s))))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error of the operation, if any
                    return
            if self.comm.peers is not None and self.comm.peers.ended():
                raise RuntimeError("connection lost: a peer's process has ended")
            if self.comm.peers is not None and (text := self.comm.peers.gave_up()):
                self.comm.failed = PeerError(f"rank {self.rank} in {description}: {text}. This group is unusable.")
                raise self.comm.failed
            if remaining_s <= 0:
                raise RuntimeError("timed out")
            if not noted and self.comm.peers is not None:
                self.comm.peers.note(str(number), description)
                noted = True

    def give_up(self, text: str) -> None:
        """Report that this rank abandons operations in flight. Other ranks raise ``PeerError`` within a second.

        Over NCCL they raise at the deadline, because ranks do not check for reports while they wait.
        """
        if self.comm.failed is None and not self.comm.calls.gave_up:
            self.comm.calls.gave_up = text
            if self.comm.peers is not None:
                self.comm.peers.give_up(text)
            if self.comm.core is not None:
                self.comm.core.give_up()

    def peer_error(
        self, message: str, waited_s: float, description: str, number: int | None = None
    ) -> PeerError | None:
        """Return the typed error for the backend's ``message``; None if no peer caused it."""
        timed_out, lost = _TIMED_OUT.search(message), _LOST.search(message)
        if not timed_out and not lost:
            return None
        if self.comm.peers is None:
            kind = PeerTimeout if timed_out else PeerDied
            return kind(f"rank {self.rank} in {description} after {waited_s:.1f} s: {message}")
        dead = self.comm.peers.ended()
        if dead:
            who = ", ".join(self.comm.peers.describe(rank) for rank in dead)
            return PeerDied(
                f"rank {self.rank} in {description}: lost {who}. Restart the ranks; this group is unusable. "
                f"{SAME_CALLS}."
            )
        key = str(self.comm.num_operations if number is None else number)
        self.comm.peers.note(key, description)
        silent = self.comm.peers.silent(key)
        dead = self.comm.peers.ended()
        who = ", ".join(self.comm.peers.describe(rank) for rank in dead or silent) or "an unknown peer"
        text = f"rank {self.rank} in {description}: waited {waited_s:.1f} s (timeout {self.timeout_s:g} s) for {who}"
        if dead or not timed_out:
            return PeerDied(f"{text}; the connection was lost ({message}). This group is unusable.")
        return PeerTimeout(
            f"{text}. The rank hangs, is slow, or took another path through the program; see its stacks (py-spy dump), "
            f"or increase DispatchOptions.timeout_s. This group is unusable. {SAME_CALLS}."
        )


class AbortOnError:
    """Context manager that calls ``abort`` for an exception that leaves its block.

    It is a class because ``contextmanager`` would add several Python calls to each operation.
    """

    __slots__ = ("_abort",)

    def __init__(self, abort: Callable[[Exception], None]) -> None:
        self._abort = abort

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception):
            self._abort(error)


def needs_report(error: BaseException, comm: object = ANY) -> bool:
    """Return whether the ranks of communicator ``comm`` must learn of ``error``, which they may have raised too.

    Activation checkpointing ends a forward pass early with _StopRecomputationError, on all ranks.
    """
    return not isinstance(error, _StopRecomputationError) and not known_to_peers(error, comm)


def raised_text(error: BaseException, label: str) -> str:
    """Return the text with which the other ranks raise. label: name of the layer."""
    where = f" in layer {label!r}" if label else ""
    text = " ".join(str(error).split())[:MESSAGE_CHARS]
    return f"raised {type(error).__name__}{where} instead of its next operation: {text}"


def operation(description: str) -> str:
    """Return the name of the operation in ``description``, without the call number and the shape."""
    return description.partition(" of (")[0].partition(" (")[0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return as_dtype(torch.uint8, tensor.view(1, -1)).view(-1)
