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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.data_parallel import expert_modules
from moe_comm.topology import ParallelMesh, shard_slice
from moe_comm.train.parallel.bucket_schedule import Transfers, blocks_of
from moe_comm.train.parallel.fsdp_collectives import UnitCollectives, UnitGroups
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, master_dtype, named_parameters
from moe_comm.train.parallel.zero import compute_in

DENSE_AXES = ("cp", "dp")
EXPERT_AXES = ("edp",)


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
    ) -> None:
        self._mesh, self._transfers, self._ignored, self._ranks = mesh, transfers, ignored, units
        self._reshard = reshard_after_forward
        self._units: list[UnitCollectives] = []
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
            if transfers.lanes[0].duplicates:
                _prefetch(root)
            if interleave:
                _run_in_turns(root)
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
        fully_shard(
            module,
            mesh=ranks.mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda param: Shard(shard_slice(param.shape, 0, world, even=True).dim),
            mp_policy=policy,
            ignored_params=self._ignored & set(module.parameters()),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        self._units.append(UnitCollectives(module, ranks.groups, self._transfers.lanes[0]))
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
            families.setdefault(owned.replicated_axes, []).append((owned, grad.to(owned.value.dtype)))
        for axes, family in families.items():
            # Empty shards take part: all ranks of these groups have the same shards.
            sums = self._transfers.reducer.sum_all([grad for _, grad in family], self._mesh.group(*axes))
            for (owned, _), total in zip(family, sums, strict=True):
                owned.value.grad = total

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


def _prefetch(root: nn.Module) -> None:
    """Make each unit of ``root`` gather the next one: experts during attention, the next block during experts.

    Units are gathered in the order of ``modules()``, which is that of the forward pass. Backward prefetches in the
    reverse order by itself.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _run_in_turns(root: nn.Module) -> None:
    """For interleaved micro-batches, gather and reduce all units of a block with the block.

    The hooks of ``root`` also run for ``forward_in_turns``.
    """
    for block in blocks_of(root):
        for unit in block.modules():
            if isinstance(unit, FSDPModule) and unit is not block:
                state = unit._get_fsdp_state()
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
                block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
                block.register_forward_hook(state._post_forward)
        block.register_forward_pre_hook(_allow_fp32_sums)
    if hasattr(root, "forward_in_turns"):
        model: Any = root
        forward = model.forward_in_turns

        def forward_in_turns(*args: Any) -> Any:
            _allow_fp32_sums(root)
            return forward(*args)

        model.forward_in_turns = forward_in_turns
        register_fsdp_forward_method(root, "forward_in_turns")


def _allow_fp32_sums(module: nn.Module, *_: object) -> None:
    """Allow fp32 gradients on bf16 weights, to sum micro-batches in fp32. Weights that FSDP ignores have them."""
    for param in module.parameters():
        if not isinstance(param, DTensor) and master_dtype(param) not in (param.dtype, param.grad_dtype):
            param.grad_dtype = None


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
