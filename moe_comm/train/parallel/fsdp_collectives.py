"""FSDP's collectives with recorded spans, counted as communication time of a step.

On the CPU, FSDP waits for each collective, because it overlaps them with streams of a GPU. With overlap, the gathers
that FSDP prefetches run in the threads of the backend, and gradients are reduced in the transfer thread:

    main thread       block 1, forward │ experts 1 │ ..  backward: experts 1       │ block 1       │ experts 0 │ .. wait
    backend           [experts 1]      │ [block 2] │     [block 1]                 │ [experts 0]   │ [block 0] │
    transfer thread                    │           │                [sum experts 1]│ [sum block 1] │           │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_comm.layers.parallel.collectives import channel_of, scatter_sum
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.groups import group_of
from moe_comm.train.parallel.bucket_schedule import Lane, Transfer

# Newer versions of torch renamed the functions and warn about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MAX_WAIT = timedelta(days=1)
"""The timeout of the group ends a wait earlier."""


@dataclass(frozen=True)
class UnitGroups:
    """The process groups of an FSDP unit.

    Attributes:
        shards: the ranks over which the unit is sharded.
        replicas: the ranks that store the same shard; None: this rank.
    """

    shards: ProcessGroup
    replicas: ProcessGroup | None = None

    def duplicates(self, lane: Lane) -> UnitGroups | None:
        """Return groups of the same ranks for ``lane``; None if gradients are reduced in the main thread."""
        shards = lane.duplicates.get(self.shards)
        if shards is None:
            return None
        return UnitGroups(shards, None if self.replicas is None else lane.duplicates[self.replicas])


class UnitCollectives:
    """The collectives of one FSDP unit, without those of nested units.

    Args:
        module: the unit.
        groups: groups of the unit.
        lane: reduces gradients, if it has groups for the unit.
    """

    def __init__(self, module: FSDPModule, groups: UnitGroups, lane: Lane) -> None:
        self._groups, self._duplicates, self._thread = groups, groups.duplicates(lane), lane.thread
        self._reducer = reducer = lane.reducer
        self._pending: Transfer | None = None
        group = groups.shards
        module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        on_cpu = next(module.parameters()).device.type == "cpu"  # type: ignore[attr-defined]
        if on_cpu or reducer.compress or groups.replicas is not None:
            for each in (group, groups.replicas):
                if each is not None and each.size() > 1:
                    channel_of(each)  # the first call is collective, so all ranks make it here
            module.set_custom_reduce_scatter(_RankOrderReduceScatter(self))  # type: ignore[arg-type]
        else:
            module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
        if self._duplicates is not None:
            module._set_unshard_async_op(True)

    def wait(self) -> None:
        """Wait for the reduction in flight."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with communication_span(Kind.COLLECTIVE, "wait for gradients"):
                pending.wait()

    def start_reduce(self, output: Tensor, parts_WN: Tensor) -> None:
        """Sum this rank's row of ``parts_WN`` over all ranks of the unit into ``output``, complete after ``wait``."""
        if self._duplicates is None or self._pending is not None:
            # FSDP adds a second reduction of a step to the first one at once, so both must be complete.
            self.wait()
            output.copy_(self._sum(parts_WN, self._groups))
            return
        duplicates = self._duplicates
        self._pending = self._thread.submit(lambda parts: output.copy_(self._sum(parts, duplicates)), parts_WN)

    def _sum(self, parts_WN: Tensor, groups: UnitGroups) -> Tensor:
        if self._reducer.compress:
            shard_N = self._reducer.scatter_sum(parts_WN, groups.shards)
        else:
            shard_N = scatter_sum(parts_WN, groups.shards, 0)[0]
        return shard_N if groups.replicas is None else self._reducer.sum(shard_N, groups.replicas)


class _Allocates:
    """The ``allocate`` method that FSDP requires of custom collectives."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _TimedWork(dist.Work):
    """A collective in flight, whose wait is recorded. FSDP calls nothing but ``wait``."""

    def __init__(self, work: dist.Work, group: ProcessGroup, nbytes: int) -> None:
        super().__init__()
        self._work, self._group, self._nbytes = work, group, nbytes

    def wait(self, timeout: timedelta = _MAX_WAIT) -> bool:
        with _gather_span(self._group, self._nbytes):
            return self._work.wait()


class _Gather(_Allocates):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        nbytes = (group.size() - 1) * input_tensor.nbytes
        if async_op:
            return _TimedWork(_gather(output_tensor, input_tensor, group=group, async_op=True), group, nbytes)
        with _gather_span(group, nbytes):
            return _gather(output_tensor, input_tensor, group=group)


class _ReduceScatter(_Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        nbytes = (group.size() - 1) * output_tensor.nbytes
        with communication_span(Kind.COLLECTIVE, "sum of gradients", group=group_of(group), nbytes=nbytes):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _RankOrderReduceScatter(_Allocates):
    """Reduce-scatter that sums in rank order, through shared memory on one host, with optional compression."""

    def __init__(self, unit: UnitCollectives) -> None:
        self._unit = unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._unit.start_reduce(output_tensor, input_tensor.view(group.size(), -1))


def _gather_span(group: ProcessGroup, nbytes: int) -> communication_span:
    return communication_span(Kind.COLLECTIVE, "gather of weights", group=group_of(group), nbytes=nbytes)
