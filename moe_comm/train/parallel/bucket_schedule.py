"""When gradient buckets are reduced and new weights are gathered: during the passes of the model, or between them.

    main thread       forward │ backward of the last micro-batch      │ reduce │ update │ publish │ forward of the next
                              │ layer 2    layer 1    layer 0         │ (wait) │        │         │ layer 0 │ layer 1
    lane 0                    │           [bucket 0]             [bucket 2]    │        │  [weights 2]
    lane 1                    │                      [bucket 1]                │        │        [weights 1]

Modules are assumed to run forward in the order of registration. A bucket is packed and sent when the last of its
gradients is complete. All ranks of a group must reduce the same buckets in the same order, but gradients can become
complete in a different order on each rank (experts without rows). So the order is fixed: buckets are sent in the
reverse order of registration of their parameters, and a complete bucket waits for its predecessors. A rank's buckets
over several groups have one order, so ranks cannot wait for each other in a cycle.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import MoeCommError
from moe_comm.layers.moe.experts import Experts
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, communication_span
from moe_comm.train.parallel.compress import GradientReducer
from moe_comm.train.parallel.zero import ReplicatedBucket, ZeroBucket

Collective = Callable[[Tensor], Tensor]
CLOSE_S = 1.0
"""Seconds that ``close`` waits for a collective that is still running after an error."""
CLOSED = "the thread that transfers gradients and weights is closed; the training state must not be used after close"


@dataclass(frozen=True)
class _Call:
    collective: Collective
    x: Tensor
    ready: torch.cuda.Event | None
    future: Future[tuple[Tensor, torch.cuda.Event | None]]


@dataclass(frozen=True)
class Transfer:
    """A collective in flight.

    Attributes:
        future: the tensor and, on a GPU, the event after which it is complete; or the exception of the collective.
    """

    future: Future[tuple[Tensor, torch.cuda.Event | None]]

    def wait(self) -> Tensor:
        """Return the tensor; raise the error of the collective."""
        result, complete = self.future.result()
        if complete is not None:
            current = torch.cuda.current_stream(result.device)
            current.wait_event(complete)
            result.record_stream(current)
        return result


class TransferThread:
    """Run collectives one after the other, in the order of ``submit``, in a thread that starts with the first one.

    All ranks of a group must submit the same collectives of the group in the same order. No other thread may use these
    groups. The time in the thread does not count as communication; the time that the main thread waits does.

    On a GPU, the collectives run on a separate stream, which waits for the work that was queued before ``submit``.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, collective: Collective, x: Tensor) -> Transfer:
        """Start ``collective`` of ``x``."""
        if self._closed:
            raise MoeCommError(CLOSED)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moe_comm transfers", daemon=True)
            self._thread.start()
        ready = None if self._stream is None else torch.cuda.current_stream(x.device).record_event()
        call = _Call(collective, x, ready, Future())
        self._calls.put(call)
        return Transfer(call.future)

    def close(self) -> bool:
        """End the thread. Collectives that have not started are dropped: waiting for them raises. Not collective.

        Returns:
            Whether the thread has ended. It has not if a collective still waits for a peer.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                call.future.set_exception(MoeCommError(CLOSED))
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        COMMUNICATION.ignore_thread()
        while (call := self._calls.get()) is not None:
            self._transfer(call)
            del call  # free its tensors before the thread waits for the next collective

    def _transfer(self, call: _Call) -> None:
        try:
            with torch.no_grad(), self._on_stream(call.ready, call.x):
                result = call.collective(call.x)
                complete = None if self._stream is None else self._stream.record_event()
        except BaseException as error:
            call.future.set_exception(error)
        else:
            call.future.set_result((result, complete))

    def _on_stream(self, ready: torch.cuda.Event | None, x: Tensor) -> contextlib.AbstractContextManager[object]:
        if self._stream is None or ready is None:
            return contextlib.nullcontext()
        self._stream.wait_event(ready)
        x.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


@dataclass(frozen=True)
class Lane:
    """A thread that runs collectives in order.

    Attributes:
        thread: the thread.
        reducer: reduces in the thread.
        duplicates: for a group of the mesh, a group of the same ranks that only this thread uses.
    """

    thread: TransferThread
    reducer: GradientReducer
    duplicates: Mapping[ProcessGroup, ProcessGroup]


@dataclass(frozen=True)
class Transfers:
    """The main thread and other threads that reduce gradients and gather weights.

    Attributes:
        reducer: reduces in the main thread.
        lanes: run collectives while the main thread computes. Buckets alternate between them, so that the link is busy
            while one lane begins or ends a collective. All have duplicates of the same groups; other groups are
            reduced in the main thread.
    """

    reducer: GradientReducer
    lanes: Sequence[Lane]

    def overlaps(self, group: ProcessGroup | None) -> bool:
        """Return whether the lanes run the collectives of ``group``."""
        return group in self.lanes[0].duplicates


Bucket = ReplicatedBucket | ZeroBucket


class BucketSchedule:
    """Reduces ``buckets`` and gathers their weights.

    Buckets whose group has an own group are transferred during the passes of the model: their gradients between
    ``begin_backward`` and ``reduce``, their weights between ``publish`` and the forward pass that needs them. Others,
    and those with a parameter of ``serial``, are reduced in ``reduce`` and gathered in ``publish``.

    Args:
        buckets: buckets with disjoint parameters.
        stages: this rank's pipeline stages, which have all parameters.
        serial: parameters whose buckets are transferred between the passes.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stages: Sequence[nn.Module],
        transfers: Transfers,
        serial: Collection[nn.Parameter] = (),
    ) -> None:
        index = {param: i for i, param in enumerate(param for stage in stages for param in stage.parameters())}
        ordered = sorted(buckets, key=lambda bucket: -min((index[param] for param in bucket.params), default=0))
        self._transfers = transfers
        self._overlapped = [
            bucket
            for bucket in ordered
            if transfers.overlaps(bucket.group) and not any(param in serial for param in bucket.params)
        ]
        self._serial = [bucket for bucket in ordered if bucket not in self._overlapped]
        self._backward_order = {id(bucket): i for i, bucket in enumerate(self._overlapped)}
        of_group: dict[ProcessGroup | None, Iterator[Lane]] = {}
        # The ranks of a group have the same buckets of that group, but other ones may differ (uneven experts).
        self._lane_of = {
            id(bucket): next(of_group.setdefault(bucket.group, cycle(transfers.lanes))) for bucket in self._overlapped
        }
        self._bucket_of = {param: bucket for bucket in self._overlapped for param in bucket.params}
        self._stages_left: dict[nn.Parameter, int] = {}
        self._incomplete: dict[int, set[nn.Parameter]] = {}
        self._reductions: list[tuple[Bucket, Transfer]] = []
        self._gathers: dict[int, tuple[ZeroBucket, Transfer]] = {}
        self._in_last: set[nn.Module] = set()
        in_stage = [(stage, set(stage.parameters())) for stage in stages]
        self._stages_of = {param: [stage for stage, params in in_stage if param in params] for param in self._bucket_of}
        for param, owners in self._stages_of.items():
            if len(owners) == 1:
                param.register_post_accumulate_grad_hook(partial(self._after_gradient, owners[0]))
        if self._overlapped:
            self._wait_before_forward(stages)
        self._reset()

    def begin_backward(self, stage: nn.Module) -> None:
        """Begin the last backward pass of ``stage`` in a step. Buckets are sent from now on."""
        self._in_last.add(stage)
        self._begun = True

    def end_backward(self, stage: nn.Module) -> None:
        """End the last backward pass of ``stage``. Parameters that it did not reach have a gradient of zero."""
        self._in_last.discard(stage)
        for param, owners in self._stages_of.items():
            if stage in owners:
                self._stages_left[param] -= 1
                if not self._stages_left[param]:
                    self._complete(param)
        self._send_complete()

    def drop(self) -> None:
        """Wait for the reductions of a step that is discarded, and drop their results.

        Collective if the last backward pass of the step has begun. All buckets are sent then, because other ranks may
        have sent more of them than this one.
        """
        if self._begun:
            self._send_all()
            for _, transfer in self._reductions:
                _wait(transfer, "gradients")
        self._reset()

    def reduce(self) -> None:
        """Reduce all buckets, or wait for those in flight. Collective."""
        self.wait_weights()  # no gather may read the masters during the next update
        self._send_all()
        for bucket in self._serial:
            bucket.unpack(bucket.reduce(self._transfers.reducer, bucket.group, bucket.pack()))
        for bucket, transfer in self._reductions:
            bucket.unpack(_wait(transfer, "gradients"))
        self._reset()

    @torch.no_grad()
    def publish(self, buckets: Sequence[ZeroBucket]) -> None:
        """Gather the new weights of ``buckets``. Collective."""
        self.wait_weights()
        # The forward pass needs the weights in the reverse order of the gradients.
        for bucket in sorted(buckets, key=lambda bucket: -self._backward_order.get(id(bucket), 0)):
            group, packed = bucket.group, bucket.pack_weights()
            assert group is not None
            lane = self._lane_of.get(id(bucket))
            if lane is None:
                bucket.unpack_weights(bucket.gather(self._transfers.reducer, group, packed))
            else:
                gather = partial(bucket.gather, lane.reducer, lane.duplicates[group])
                self._gathers[id(bucket)] = bucket, lane.thread.submit(gather, packed)

    @torch.no_grad()
    def wait_weights(self, buckets: Sequence[int] | None = None) -> None:
        """Wait for the weights of ``buckets`` (ids; None: all)."""
        for key in list(self._gathers) if buckets is None else buckets:
            if key in self._gathers:
                bucket, transfer = self._gathers.pop(key)
                bucket.unpack_weights(_wait(transfer, "weights"))

    def _wait_before_forward(self, stages: Sequence[nn.Module]) -> None:
        """Make modules wait for their weights before their forward pass.

        Experts wait for their own, so that their transfer overlaps with the attention of the block; a block waits for
        the others that it has. The first block also waits for weights that are registered before it (the embedding),
        with the stage. The last block waits at its end for those that are registered after it (the head).
        """
        for stage in stages:
            params, blocks = list(stage.parameters()), list(blocks_of(stage))
            in_blocks = [set(block.parameters()) for block in blocks]
            in_any = set().union(*in_blocks)
            last = max((i for i, param in enumerate(params) if param in in_any), default=-1)
            early = params if last < 0 else [param for param in params[:last] if param not in in_any]
            stage.register_forward_pre_hook(self._waiting_for(early))
            for block, of_block in zip(blocks, in_blocks, strict=True):
                for module in block.modules():
                    if isinstance(module, Experts):
                        of_experts = set(module.parameters())
                        module.register_forward_pre_hook(self._waiting_for(of_experts))
                        of_block -= of_experts
                block.register_forward_pre_hook(self._waiting_for(of_block))
            if last >= 0:
                blocks[-1].register_forward_hook(self._waiting_for(params[last + 1 :]))

    def _waiting_for(self, params: Iterable[nn.Parameter]) -> Callable[..., None]:
        """Return a hook that waits for the weights of ``params``."""
        buckets = sorted({id(self._bucket_of[param]) for param in params if param in self._bucket_of})
        return lambda *args: self.wait_weights(buckets)

    def _after_gradient(self, stage: nn.Module, param: Tensor) -> None:
        if stage in self._in_last:
            assert isinstance(param, nn.Parameter)
            self._complete(param)
            self._send_complete()

    def _complete(self, param: nn.Parameter) -> None:
        self._incomplete[id(self._bucket_of[param])].discard(param)

    def _send_complete(self) -> None:
        while len(self._reductions) < len(self._overlapped):
            bucket = self._overlapped[len(self._reductions)]
            if self._incomplete[id(bucket)]:
                return
            self._send(bucket)

    def _send_all(self) -> None:
        for bucket in self._overlapped[len(self._reductions) :]:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        assert bucket.group is not None
        lane = self._lane_of[id(bucket)]
        reduce = partial(bucket.reduce, lane.reducer, lane.duplicates[bucket.group])
        self._reductions.append((bucket, lane.thread.submit(reduce, bucket.pack())))

    def _reset(self) -> None:
        self._begun = False
        self._reductions.clear()
        self._in_last.clear()
        self._stages_left = {param: len(owners) for param, owners in self._stages_of.items()}
        self._incomplete = {id(bucket): set(bucket.params) for bucket in self._overlapped}


def _wait(transfer: Transfer, what: str) -> Tensor:
    with communication_span(Kind.COLLECTIVE, f"wait for {what}"):
        return transfer.wait()


def blocks_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: the children of ModuleLists and ModuleDicts of ``root`` that have parameters."""
    for child in root.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (block for block in child.children() if any(True for _ in block.parameters()))
