"""Data parallelism: one interface for replication, ZeRO-1 and FSDP2.

Gradients are plain sums over the ranks that store the parameter, because the loss is divided by the global number of
tokens of the step. No strategy divides gradients, and experts need no separate scale.

    data_parallel = DataParallel(modules, shardings, mesh, DataParallelOptions(sharding="zero1"))
    optimizer = make_optimizer(data_parallel.owned(), mesh, ...)
    each step:   zero_grad
                 forward and backward of each micro-batch      (a ``Runner`` marks the last backward pass)
                 reduce, clip_, optimizer.step, publish

With ``overlap_gradients``, gradients are reduced while the last backward pass runs, and ZeRO gathers new weights while
the next forward pass runs (``bucket_schedule``). The results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import compare
from moe_comm.comm.communicator import find_communicator
from moe_comm.comm.group_setup import channel_of, communicator_of
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel import expert_modules
from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.runtime.event_layout import NO_NAME
from moe_comm.topology import ParallelMesh, Sharding
from moe_comm.train.parallel.bucket_schedule import BucketSchedule, Lane, Transfer, Transfers, TransferThread
from moe_comm.train.parallel.compress import GradientReducer, GradientTraffic
from moe_comm.train.parallel.fsdp import DENSE_AXES, EXPERT_AXES, FSDPParameters, UnitRanks, fits
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, WeightsReport, local_parameters
from moe_comm.train.parallel.zero import ReplicatedParameters, ZeroParameters
from moe_comm.train.sections import DataParallelOptions

LANES = 2
"""Collectives that run at the same time as the passes of the model."""
BUCKET_BYTES = 4 << 20
"""Maximum size of a gradient bucket."""


class DataParallel:
    """Gradient reduction and sharding of the trained parameters of one rank.

    Construct it on all ranks after the weights are initialized. Collective.

    Args:
        modules: this rank's pipeline stages, with the parameter names of the whole model.
        shardings: shardings by parameter name; a missing parameter is dense and replicated.
        mesh: the parallel mesh.
        options: sharding, compression and overlap. Without a process group all strategies are equivalent. By default,
            CPU ranks of one host do not overlap: they copy through shared memory with the cores that compute. Experts
            that are lent never do.
        tied: names of the copies of a tied embedding and output layer on the first and last pipeline stage. Their
            gradients are summed, and norms count only the first copy.
        dtype: compute dtype of parameters, float32 or bfloat16, with fp32 masters and gradients. None: keep the dtypes.
        full_precision: name patterns (with ``*``) of parameters that always compute in fp32.
        keep_gradients: keep the gradients of this rank until ``zero_grad``. Otherwise ZeRO frees them when their bucket
            is packed.
        offload_weights: with "fsdp", store the shards of weights, gradients and optimizer state in the host's memory.

    Raises:
        ConfigError: another dtype; a parameter's shape contradicts its sharding, or FSDP cannot shard it. Also with
            ``offload_weights``, if FSDP does not shard all parameters.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        shardings: Mapping[str, Sharding],
        mesh: ParallelMesh,
        options: DataParallelOptions | None = None,
        tied: Sequence[str] = (),
        *,
        dtype: torch.dtype | None = None,
        full_precision: Sequence[str] = (),
        keep_gradients: bool = False,
        offload_weights: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"parameters compute in float32 or bfloat16; got {dtype}")
        self._dtype, self._full_precision = dtype, tuple(full_precision)
        self._keep_gradients, self._offload, self._bucket_bytes = keep_gradients, offload_weights, bucket_bytes
        self._stages = stages = [modules] if isinstance(modules, nn.Module) else list(modules)
        self._copies = [
            copies
            for stage in stages
            for _, module, _ in expert_modules(stage)
            if (copies := getattr(module, "copies", None)) is not None
        ]
        # Lent experts are sent from complete parameters, and their gradients return to the homes in backward.
        self._after_passes = {param for copies in self._copies for param in copies.parameters}
        self.mesh, self.tied = mesh, frozenset(tied)
        self.options = options = options or DataParallelOptions()
        trained = [self._with_compute_dtype(item) for item in local_parameters(stages, shardings, mesh)]
        device = torch.device(mesh.device)
        self._device = device if offload_weights else next((item.param.device for item in trained), device)
        self._units: tuple[UnitRanks, UnitRanks] | None = None
        if options.sharding == "fsdp" and dist.is_initialized():
            dense, experts = (UnitRanks.of(mesh, axes, options.dp_replicate) for axes in (DENSE_AXES, EXPERT_AXES))
            self._units = dense, experts
        sharded = [item for item in trained if self._is_sharded(item)]
        parts = sharded, [item for item in trained if item not in set(sharded)]
        if offload_weights:
            self._check_offload(trained, sharded)
            for item in parts[1]:  # without elements
                item.param.data = item.param.data.to(mesh.device)
        self._transfers = self._make_transfers(*parts)
        self._groups = self._make_groups(stages, *parts)
        names = [item.name for item in trained]
        by_name = {owned.name: owned for group in self._groups for owned in group.owned}
        counted = next((name for name in names if name in self.tied), None) if mesh.place["pp"] == 0 else None
        self._owned = [by_name[name] for name in names]
        for owned in self._owned:
            owned.counted = owned.name not in self.tied or owned.name == counted
        buckets = [bucket for part in (self._zero, self._replicated) if part is not None for bucket in part.buckets]
        transfers = self._transfers
        if self._units is not None:
            transfers = replace(transfers, lanes=transfers.lanes[1:])
        self._schedule = BucketSchedule(buckets, stages, transfers, self._after_passes)
        # Not a lane of gradients and weights: the next forward pass would wait until the state of experts has moved.
        self._background_groups = dict[ProcessGroup, ProcessGroup]()
        self._background = Lane(TransferThread(self._device), self._new_reducer(), self._background_groups)

    @property
    def traffic(self) -> GradientTraffic:
        """Bytes sent so far. FSDP's collectives are not included, except for compressed gradients."""
        transfers = self._transfers
        parts = [reducer.traffic for reducer in (transfers.reducer, *(lane.reducer for lane in transfers.lanes))]
        return GradientTraffic(sum(part.reduced for part in parts), sum(part.published for part in parts))

    def take_copies(self) -> WeightsReport | None:
        """Return the bytes of weights and gradients copied since the last call; None if weights are on the device."""
        return None if self._fsdp is None or self._fsdp.copies is None else self._fsdp.copies.take()

    def owned(self) -> list[OwnedParameter]:
        """Return the shards that this rank's optimizer updates, in the same order on all ranks of the stage."""
        return list(self._owned)

    def local_gradients(self) -> Iterator[Tensor]:
        """Iterate over the gradients that the backward passes of this rank have computed, before ``reduce``."""
        for param in (param for stage in self._stages for param in stage.parameters()):
            if param.grad is not None:
                yield param.grad

    def zero_grad(self) -> None:
        """Reset all gradients. Call it before the first backward pass of a step. Collective after a discarded step."""
        self._schedule.drop()
        for group in self._groups:
            group.zero_grad()

    def begin_backward(self, stage: nn.Module) -> None:
        """Begin the last backward pass of ``stage`` in a step: its gradients are reduced as they complete.

        Optional: without it, ``reduce`` reduces all gradients. All ranks of the stage make the same calls.
        """
        self._schedule.begin_backward(stage)

    def end_backward(self, stage: nn.Module) -> None:
        """End the last backward pass of ``stage`` in a step."""
        self._schedule.end_backward(stage)

    def reduce(self) -> None:
        """Reduce gradients over ranks into the ``grad`` of the owned shards; missing ones count as zero. Collective."""
        self._schedule.reduce()
        if self._fsdp is not None:
            self._fsdp.reduce()
        self._sum_tied()

    def publish(self) -> None:
        """Update the model's parameters from the owned shards, after a step or a load. Collective.

        With ``overlap_gradients``, blocks of the model wait for their weights before their next forward pass. Call
        ``wait_weights`` before other code reads them.
        """
        if self._zero is not None:
            self._schedule.publish(self._zero.buckets)
        if self._fsdp is not None:
            self._fsdp.publish()
        self._replicated.publish()
        for copies in self._copies:
            copies.end_step()

    def forget_residents(self) -> None:
        """Begin the next step as a run that resumes does, without weights that lent experts are expected to need.

        All ranks call it between steps.
        """
        for copies in self._copies:
            copies.forget()

    def wait_weights(self) -> None:
        """Wait until all parameters of the model have the values of the last ``publish``."""
        self._schedule.wait_weights()

    def finish(self) -> None:
        """Wait for transfers in flight, and drop the gradients of a step that is discarded. Collective."""
        self.zero_grad()
        self._schedule.wait_weights()

    def close(self) -> None:
        """End the threads that reduce gradients and gather weights, and close their groups. Not collective.

        Collectives that have not started are dropped, see ``finish``.
        """
        for lane in (*self._transfers.lanes, self._background):
            if lane.thread.close():
                for group, duplicate in lane.duplicates.items():
                    comm = find_communicator(group)
                    if comm is not None:
                        comm.close_part(duplicate)

    def overlaps(self, group: ProcessGroup) -> bool:
        """Return whether transfers over ``group`` run during the passes. Collective in the first call for the group."""
        return group.size() > 1 and self._overlaps(group)

    def in_background(self, group: ProcessGroup, transfer: Callable[[ProcessGroup], None], x: Tensor) -> Transfer:
        """Run ``transfer`` in a thread, with a second group of the ranks of ``group``. Collective.

        Args:
            x: one of the tensors that ``transfer`` reads.
        """
        if group not in self._background_groups:
            self._background_groups |= self._duplicates([group])
        duplicate = self._background_groups[group]

        def run(x: Tensor) -> Tensor:
            transfer(duplicate)
            return x

        return self._background.thread.submit(run, x)

    def _is_sharded(self, item: LocalParameter) -> bool:
        """Return whether a rank stores or updates a part of the parameter only."""
        if self.options.sharding == "zero1" or (self._units is not None and not self._in_unit(item)):
            return ZeroParameters.fits(item, self.mesh)
        return self._units is not None and fits(item) and not self._units[item.sharding.expert].replicated

    def _check_offload(self, trained: Sequence[LocalParameter], sharded: Sequence[LocalParameter]) -> None:
        """Raise ConfigError on all ranks unless FSDP shards all parameters with elements. Collective."""
        stores = "offload.weights = 'host' stores the shards of FSDP on the host"
        if self._units is None:
            raise ConfigError(f"{stores}: set parallel.sharding = 'fsdp', and start a process group, also for one rank")
        in_units = {item for item in sharded if self._in_unit(item)}
        others = [item.name for item in trained if item.param.numel() and item not in in_units]
        fault: ConfigError | None = None
        if others:
            fault = ConfigError(
                f"{stores}, and FSDP does not shard {others[0]}: parallel.dp_replicate must be less than cp x dp (for "
                "experts: than edp, unless that is 1), and placement.kind 'fixed' without balance"
            )
        if self.mesh.world_group is not None:  # other stages may have no such parameter
            compare(channel_of(self.mesh.world_group), "offload.weights", {}, fault=fault)
        elif fault is not None:
            raise fault

    def _in_unit(self, item: LocalParameter) -> bool:
        """Return whether FSDP may shard the parameter. The weights of copies are sent from complete parameters."""
        return self._units is not None and item.param not in self._after_passes

    def _make_groups(
        self, stages: list[nn.Module], sharded: Sequence[LocalParameter], replicated: Sequence[LocalParameter]
    ) -> list[ZeroParameters | FSDPParameters | ReplicatedParameters]:
        self._zero: ZeroParameters | None = None
        self._fsdp: FSDPParameters | None = None
        in_units = [item for item in sharded if self._in_unit(item)]
        in_shards = [item for item in sharded if not self._in_unit(item)]
        if in_units and self._units is not None:
            ignored = {item.param for item in (*replicated, *in_shards)}
            # Zero-bubble schedules look up a stage's weights between forward and backward, and silently omit the
            # gradients of resharded ones. Other schedules would gather the weights for each micro-batch.
            self._fsdp = FSDPParameters(
                stages,
                in_units,
                ignored,
                self.mesh,
                self._transfers,
                self._units,
                reshard_after_forward=self.mesh.size("pp") == 1,
                interleave=self.options.interleave,
                offload=self._offload,
            )
        if in_shards:
            self._zero = ZeroParameters(in_shards, self.mesh, self._bucket_bytes, self._keep_gradients)
        self._replicated = ReplicatedParameters(replicated, self.mesh, self._bucket_bytes)
        return [group for group in (self._zero, self._fsdp, self._replicated) if group is not None]

    def _make_transfers(self, sharded: Sequence[LocalParameter], replicated: Sequence[LocalParameter]) -> Transfers:
        """Return the threads. With FSDP, its units use the first lane, and other parameters the second one."""
        in_buckets = replicated if self._units is not None else [*sharded, *replicated]
        in_passes = [item for item in in_buckets if item.param not in self._after_passes]
        groups = self._overlapped(self.mesh.sum_group(item.sharding) for item in in_passes)
        duplicates = [self._duplicates(self._unit_groups() if self._units is not None else groups)]
        duplicates += [self._duplicates(groups) for _ in range(LANES - 1)]
        lanes = [Lane(TransferThread(self._device), self._new_reducer(), groups) for groups in duplicates]
        return Transfers(self._new_reducer(), lanes)

    def _new_reducer(self) -> GradientReducer:
        return GradientReducer(self.options.compress, self._bucket_bytes)

    def _unit_groups(self) -> list[ProcessGroup | None]:
        """Return the groups of FSDP units whose gradients are reduced in a thread. Collective."""
        if self._units is None or self._keep_gradients:
            return []  # the guard compares the gradients of FSDP before ``reduce``, so they must be complete
        # Decided for all ranks of a unit at once: a group of replicas may be on one host and the next one on several.
        overlapped = self._overlapped(self.mesh.group(*unit.axes) for unit in self._units)
        units = [unit for unit in self._units if self.mesh.group(*unit.axes) in overlapped and not unit.replicated]
        return [group for unit in units for group in (unit.groups.shards, unit.groups.replicas)]

    def _overlapped(self, groups: Iterable[ProcessGroup | None]) -> list[ProcessGroup]:
        """Return the groups whose collectives run in threads. Collective."""
        return [group for group in _in_order(groups) if self._overlaps(group)]

    def _duplicates(self, groups: Iterable[ProcessGroup | None]) -> dict[ProcessGroup, ProcessGroup]:
        """Return a second group of the same ranks for each group. Collective."""
        duplicates: dict[ProcessGroup, ProcessGroup] = {}
        for group in _in_order(groups):
            duplicates[group] = communicator_of(group).duplicate(channel_of(group).timeout_s)
            # Spans with a group are counted as calls of the main thread.
            communicator_of(duplicates[group]).span_group = NO_NAME
            channel_of(duplicates[group])  # the first call is collective
        return duplicates

    def _overlaps(self, group: ProcessGroup) -> bool:
        """Return whether collectives over ``group`` run in threads. Collective in the first call for the group."""
        several_hosts = len(set(communicator_of(group).hosts)) > 1 or self.mesh.device == "cuda"
        overlap = self.options.overlap_gradients
        return overlap == "on" or (overlap == "auto" and several_hosts)

    def _with_compute_dtype(self, trained: LocalParameter) -> LocalParameter:
        if self._dtype is None or trained.param.dtype == torch.float64:
            return trained
        full_precision = any(fnmatchcase(trained.name, pattern) for pattern in self._full_precision)
        return replace(trained, dtype=torch.float32 if full_precision else self._dtype)

    def _sum_tied(self) -> None:
        """Sum the gradients of tied copies: on this rank (V-shaped schedules), or on the first and last stage."""
        copies = [owned for owned in self._owned if owned.name in self.tied]
        if not copies:
            return
        grads = [owned.value.grad for owned in copies]
        total = grads[0]
        assert total is not None
        for grad in grads[1:]:
            assert grad is not None
            total = total + grad
        if len(copies) == 1 and self.mesh.tied_group is not None:
            total = sum_values(total.to(self._device), self.mesh.tied_group).to(total.device)
        for owned in copies:
            owned.value.grad = total.clone() if len(copies) > 1 else total


def _in_order(groups: Iterable[ProcessGroup | None]) -> list[ProcessGroup]:
    """Return the groups of several ranks in the same order on all ranks, so that they do not wait in a cycle."""
    return sorted(
        {group for group in groups if group is not None and group.size() > 1}, key=dist.get_process_group_ranks
    )
