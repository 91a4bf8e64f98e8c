"""FSDP2 (torch's ``fully_shard``) over a parallel mesh: each rank stores a shard of each parameter (``shard_slice``).

    unit                                  sharded over                 gradient additionally summed over
    each module of experts                edp                          etp, unless sharded over it
    each block (child of a ModuleList     cp x dp                      tp, unless sharded over it: norms, router
      or ModuleDict of the root)
    the root: embedding, norm, head       cp x dp                      the same

With R replicas (HSDP), the ranks of each unit are divided into R blocks of consecutive ranks, for example hosts. A unit
is sharded over a block, so its weights are gathered within the block. A gradient is reduce-scattered over the block,
and the shards are then summed over the blocks.

fully_shard gathers a unit's weights before its forward and backward passes, and reduce-scatters its gradients after
backward. Gradients are plain sums: there is no division (``set_gradient_divide_factor(1)``), and no pre-multiplied sum,
which gloo does not have. A dimension other than the first is sharded only if it divides by the number of ranks.

Interleaved micro-batches (``layers/parallel/interleave.py``) use the units of a block alternately. Each unit
would be gathered for each of them, and reduce the gradient of one micro-batch before that of the other. So the block
gathers all its units before the first micro-batch, and reduces them after the backward passes of all:

    units of a block      hooks of     gathered for one pass of two micro-batches
    block                 block        attention a, attention b, experts a, experts b
    router, experts       block        the same, instead of twice each

With ``offload``, shards of weights, gradients and optimizer state are in the host's memory, and the optimizer runs on
the CPU. A unit's shards are copied to the GPU before they are gathered, and the shards of its gradients to the host
after they are reduced:

    host    shards ──copy──┐                                      ┌──▶ gradients, optimizer, new shards
    GPU                    └──▶ all-gather ─▶ passes ─▶ reduce ───┘ copy

The copies of a layer run during the passes of the layer before (``gathers``). On the CPU, FSDP waits for each
collective, because it overlaps them with streams of a GPU. With overlap, the gathers that FSDP prefetches run in the
threads of the backend, and gradients are reduced in the transfer thread:

    main thread     block 1, forward     │ experts 1 │ .. backward: experts 1       │ block 1       │ experts 0 │ wait
    backend         [experts 1][block 2] │           │    [block 1]                 │ [experts 0]   │ [block 0] │
    transfer thread                      │           │               [sum experts 1]│ [sum block 1] │           │
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.data_parallel import expert_modules
from moe_comm.layers.parallel.collectives import channel_of, scatter_sum
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.groups import group_of
from moe_comm.topology import ParallelMesh, shard_slice
from moe_comm.train.parallel.bucket_schedule import Lane, Transfer, Transfers, blocks_of
from moe_comm.train.parallel.gathers import WeightCopies, gather_by_block, prefetch
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, master_dtype, named_parameters
from moe_comm.train.parallel.zero import compute_in

DENSE_AXES = ("cp", "dp")
EXPERT_AXES = ("edp",)
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
        ranks: ranks of the unit.
        lane: reduces gradients, if it has groups for the unit.
        offload: FSDP copies reduced gradients to the host, so they are complete when a reduction returns.
    """

    def __init__(self, module: FSDPModule, ranks: UnitRanks, lane: Lane, offload: bool) -> None:
        groups, duplicates = ranks.groups, ranks.groups.duplicates(lane)
        self._groups, self._thread = groups, lane.thread
        self._duplicates = None if offload else duplicates
        self._reducer = reducer = lane.reducer
        self._pending: Transfer | None = None
        group = groups.shards
        module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        if ranks.mesh.device_type == "cpu" or reducer.compress or groups.replicas is not None:
            for each in (group, groups.replicas):
                if each is not None and each.size() > 1:
                    channel_of(each)  # the first call is collective, so all ranks make it here
            module.set_custom_reduce_scatter(_RankOrderReduceScatter(self))  # type: ignore[arg-type]
        else:
            module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
        if duplicates is not None and not offload:  # copies from the host need the streams of FSDP
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


@dataclass(frozen=True)
class UnitRanks:
    """The ranks of the units with dense parameters, or of those with experts.

    Attributes:
        axes: mesh axes of the ranks.
        mesh: the ranks over which a unit is sharded.
        groups: the process groups of these and of the ranks that store the same shard.
        replicas: number of blocks that each store all shards.
    """

    axes: tuple[str, ...]
    mesh: DeviceMesh
    groups: UnitGroups
    replicas: int

    @property
    def replicated(self) -> bool:
        """Whether there are several ranks and each block has only one, so that nothing is sharded."""
        return self.mesh.size() == 1 and self.replicas > 1

    @classmethod
    def of(cls, mesh: ParallelMesh, axes: tuple[str, ...], replicas: int) -> UnitRanks:
        """Divide the ranks of ``axes`` into ``replicas`` blocks, unless there is only one rank. Collective."""
        if mesh.size(*axes) == 1:
            replicas = 1
        shards = mesh.flat_mesh(*axes, replicas=replicas)
        groups = UnitGroups(shards.get_group(), mesh.replica_group(*axes, replicas=replicas))
        return cls(axes, shards, groups, replicas)


class FSDPParameters:
    """Parameters that FSDP shards. ``fully_shard`` changes ``modules`` in place.

    Args:
        modules: this rank's pipeline stages; each is an FSDP root.
        trained: the parameters to shard.
        ignored: parameters of ``modules`` that FSDP ignores.
        transfers: reduces gradients.
        units: ranks of the units with dense parameters, and of those with experts.
        reshard_after_forward: free the gathered weights of each unit, except the root, after forward.
        interleave: two micro-batches run at a time.
        offload: store the shards in the host's memory.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        trained: Sequence[LocalParameter],
        ignored: set[nn.Parameter],
        mesh: ParallelMesh,
        transfers: Transfers,
        units: tuple[UnitRanks, UnitRanks],
        *,
        reshard_after_forward: bool,
        interleave: bool,
        offload: bool = False,
    ) -> None:
        self._mesh, self._transfers, self._ignored, self._ranks = mesh, transfers, ignored, units
        self._reshard, self._offload = reshard_after_forward, offload
        self._units: list[UnitCollectives] = []
        self.copies = WeightCopies() if offload else None
        self.roots = list(modules)
        _check_disjoint(self.roots)
        self._shapes = {item.name: tuple(item.param.shape) for item in trained}
        self._kinds: dict[nn.Parameter, tuple[bool, torch.dtype | None]] = {}
        # A rank without experts also needs the expert unit: FSDP prefetches the next unit. Without this one, the rank
        # would gather a later unit with ranks that wait for it in dispatch. An empty parameter must not require a
        # gradient.
        for root in self.roots:
            for _, module, gradients in expert_modules(root):
                gradients.freeze_empty(module)
        for item in trained:
            _check_axes(item)
            master = master_dtype(item.param)
            compute_in(item.param, master)
            item.param.requires_grad_(item.param.numel() > 0)
            self._kinds[item.param] = (item.sharding.expert, None if item.dtype == master else item.dtype)
        default = next((dtype for _, dtype in self._kinds.values() if dtype is not None), None)
        for root in self.roots:
            self._shard(root, default)
            if offload or transfers.lanes[0].duplicates:
                prefetch(root, layer_ahead=offload)
            if interleave:
                gather_by_block(root)
        self._bind(trained)

    def _shard(self, root: nn.Module, default: torch.dtype | None) -> None:
        blocks = list(blocks_of(root))
        # Innermost first: a unit includes the parameters of its submodules that no other unit has.
        for module in reversed(list(root.modules())):
            kinds = {self._kinds[p] for p in module.parameters(recurse=False) if p in self._kinds}
            if len({expert for expert, _ in kinds}) > 1:
                raise ConfigError(
                    f"{type(module).__name__} directly has expert and other parameters, which FSDP shards over "
                    "different ranks; move the experts to a separate module"
                )
            expert = any(expert for expert, _ in kinds)
            # Weights whose dtype differs from that of their block (a router) are a separate unit.
            separate = bool(kinds) and all(dtype != default for _, dtype in kinds)
            if expert or separate or module is root or any(module is block for block in blocks):
                self._fully_shard(module, expert, None if separate else default, module is not root and self._reshard)

    def _fully_shard(self, module: nn.Module, expert: bool, dtype: torch.dtype | None, reshard: bool) -> None:
        ranks = self._ranks[expert]
        # Inputs are not cast: modules choose their compute dtype, as without FSDP.
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        world = ranks.mesh.size()
        complete = [param for param in module.parameters() if param in self._kinds]
        # Page-locked memory makes the copies asynchronous.
        offload = CPUOffloadPolicy(pin_memory=ranks.mesh.device_type == "cuda") if self._offload else OffloadPolicy()
        fully_shard(
            module,
            mesh=ranks.mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda param: Shard(shard_slice(param.shape, 0, world, even=True).dim),
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=self._ignored & set(module.parameters()),
        )
        for param in complete:  # the callers still have it, but FSDP has copied this rank's shard
            param.data = param.data.new_empty(0)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        self._units.append(UnitCollectives(module, ranks, self._transfers.lanes[0], self._offload))
        if self.copies is not None:
            self.copies.count(module)
        # Backward can reach different parameters on different ranks (experts without rows), but the collectives must
        # match. Older versions of torch need a zero gradient for such parameters, which MoELayer provides.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)

    def _bind(self, trained: Sequence[LocalParameter]) -> None:
        """Set ``owned`` to this rank's shards of the parameters."""
        params = dict(named_parameters(self.roots))
        self._params: list[DTensor] = []
        self.owned: list[OwnedParameter] = []
        for item in trained:
            param = params[item.name]
            assert isinstance(param, DTensor)
            ranks = self._ranks[item.sharding.expert]
            shard = shard_slice(self._shapes[item.name], ranks.mesh.get_local_rank(), ranks.mesh.size(), even=True)
            value = nn.Parameter(param.to_local().detach())
            if value.shape != shard.shape(self._shapes[item.name]):
                raise MoeCommError(
                    f"internal error: FSDP stores shape {tuple(value.shape)} of {item.name}, expected {shard}"
                )
            self._params.append(param)
            self.owned.append(OwnedParameter(item.name, value, item.sharding, shard, ranks.axes, True, ranks.replicas))

    def zero_grad(self) -> None:
        self._wait()
        for param, owned in zip(self._params, self.owned, strict=True):
            param.grad = None
            owned.value.grad = None

    def reduce(self) -> None:
        """Sum gradients over the ranks that store the same shard. FSDP has summed them over its own ranks."""
        self._wait()
        families: dict[tuple[str, ...], list[tuple[OwnedParameter, Tensor]]] = {}
        for param, owned in zip(self._params, self.owned, strict=True):
            self._check_storage(param, owned)
            grad = torch.zeros_like(owned.value) if param.grad is None else _local(param.grad)
            if self.copies is not None and param.grad is not None:
                self.copies.written += grad.nbytes
            families.setdefault(owned.replicated_axes, []).append((owned, grad.to(owned.value.dtype)))
        for axes, family in families.items():
            group = self._mesh.group(*axes)
            # Shards on the host are summed where those on the device are, with the same bits.
            grads = [grad if group is None else grad.to(self._mesh.device) for _, grad in family]
            # Empty shards take part: all ranks of these groups have the same shards.
            sums = self._transfers.reducer.sum_all(grads, group)
            for (owned, _), total in zip(family, sums, strict=True):
                owned.value.grad = total.to(owned.value.device)

    def publish(self) -> None:
        """Free gathered copies of the old weights (after an evaluation). The shards are updated in place."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _wait(self) -> None:
        for unit in self._units:
            unit.wait()

    def _check_storage(self, param: DTensor, owned: OwnedParameter) -> None:
        if param.to_local().data_ptr() != owned.value.data_ptr():
            raise MoeCommError(
                f"the storage of {owned.name} changed after the model was sharded; do not call to(), half() or "
                "load_state_dict(assign=True) on a sharded model"
            )


def fits(trained: LocalParameter) -> bool:
    """Return whether FSDP can shard the parameter: it needs a dimension and local elements.

    Expert parameters only need elements on some rank, because all ranks must have their unit. An empty vocabulary shard
    is not sharded.
    """
    elements = math.prod(trained.sharding.shape) if trained.sharding.expert else trained.param.numel()
    return trained.param.dim() > 0 and elements > 0


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _check_axes(trained: LocalParameter) -> None:
    axes = EXPERT_AXES if trained.sharding.expert else DENSE_AXES
    sharded = [axis for axis in axes if axis not in trained.sharding.sum_axes]
    if sharded:
        raise ConfigError(f"{trained.name} is already sharded over {sharded}, which FSDP uses; use zero1 or replicate")


def _check_disjoint(roots: Sequence[nn.Module]) -> None:
    name_of: dict[nn.Parameter, str] = {}
    for root in roots:
        names = dict(root.named_parameters())
        for param in names.values():
            if param in name_of:
                raise ConfigError(
                    f"two pipeline stages of this rank share {name_of[param]}, which FSDP does not support; give each "
                    "stage its own copy and pass both names as tied"
                )
        name_of.update({param: name for name, param in names.items()})
