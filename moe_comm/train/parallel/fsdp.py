"""FSDP2 (torch's ``fully_shard``) over a folded mesh: every rank keeps its share of each parameter (``deal``).

    unit                                  spread over                  its gradient then summed over
    each module of experts                edp                          etp, where it is not cut by it
    each block (child of a ModuleList     cp x dp                      tp, where it is not cut by it: norms, router
      or ModuleDict of the root)
    the root: embedding, norm, head       cp x dp                      the same

fully_shard gathers a unit's weights before its forward and its backward pass and reduce-scatters its gradients after.
Its sums are plain sums: no division (``set_gradient_divide_factor(1)``), and no pre-multiplied sum, which gloo lacks.
A dimension other than the first is spread only if it divides by the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology import ParallelMesh, deal
from moe_comm.train.parallel.compress import Wire
from moe_comm.train.parallel.metered import Allocates, meter
from moe_comm.train.parallel.owned import Held, Owned, master_dtype, named
from moe_comm.train.parallel.replicate import compute_in

DENSE_AXES = ("cp", "dp")
EXPERT_AXES = ("edp",)


class Sharded:
    """Parameters of which this rank keeps its share; ``modules`` are changed in place by ``fully_shard``.

    Args:
        modules: this rank's pipeline stages, each its own FSDP root.
        held: their parameters. ignored: those of ``modules`` that FSDP leaves alone.
        reshard_after_forward: of every unit but the root.

    Raises:
        ConfigError: a module has dense and expert parameters of its own (not of its children), or a parameter is cut
            over an axis that FSDP would spread it over, or two stages share a parameter.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[Held],
        ignored: set[nn.Parameter],
        mesh: ParallelMesh,
        wire: Wire,
        reshard_after_forward: bool = True,
    ) -> None:
        self._mesh, self._wire, self._ignored, self._reshard = mesh, wire, ignored, reshard_after_forward
        self._flat = {axes: mesh.flat_mesh(*axes) for axes in (DENSE_AXES, EXPERT_AXES)}
        self.roots = list(modules)
        _check_apart(self.roots)
        self._shapes = {item.name: tuple(item.param.shape) for item in held}
        self._kinds: dict[nn.Parameter, tuple[bool, torch.dtype | None]] = {}
        for item in held:
            _check_axes(item)
            kept = master_dtype(item.param)
            compute_in(item.param, kept)
            # A rank without experts has the unit all the same: FSDP gathers ahead in the order of its units, and must
            # not wait there for ranks that wait in the dispatch for this one. It cannot reduce gradients of nothing.
            item.param.requires_grad_(item.param.numel() > 0)
            self._kinds[item.param] = (item.sharding.expert, None if item.dtype == kept else item.dtype)
        default = next((dtype for _, dtype in self._kinds.values() if dtype is not None), None)
        for root in self.roots:
            self._shard(root, default)
        self._bind(held)

    def _shard(self, root: nn.Module, default: torch.dtype | None) -> None:
        blocks = list(_blocks(root))
        # Innermost first: a unit takes the parameters below it that no unit has yet.
        for module in reversed(list(root.modules())):
            kinds = {self._kinds[p] for p in module.parameters(recurse=False) if p in self._kinds}
            if len({expert for expert, _ in kinds}) > 1:
                raise ConfigError(
                    f"{type(module).__name__} has expert and other parameters of its own, which FSDP spreads over "
                    "different ranks; put the experts in a module of their own"
                )
            expert = any(expert for expert, _ in kinds)
            # Weights kept in another precision than their block's (a router's) travel by themselves.
            odd = bool(kinds) and all(dtype != default for _, dtype in kinds)
            if expert or odd or module is root or any(module is block for block in blocks):
                self._fully_shard(module, expert, None if odd else default, module is not root and self._reshard)

    def _fully_shard(self, module: nn.Module, expert: bool, dtype: torch.dtype | None, reshard: bool) -> None:
        axes = EXPERT_AXES if expert else DENSE_AXES
        # Inputs are not cast: a module decides by itself what it computes in, as it does without FSDP.
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        world = self._flat[axes].size()
        fully_shard(
            module,
            mesh=self._flat[axes],
            reshard_after_forward=reshard,
            shard_placement_fn=lambda param: Shard(deal(param.shape, 0, world, even=True).dim),
            mp_policy=policy,
            ignored_params=self._ignored & set(module.parameters()),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        meter(module)
        # Ranks may differ in which parameters backward reaches (experts without rows); their collectives must not.
        # Older torch cannot be told: there, such parameters need a gradient of zeros, which MoELayer gives them.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if self._wire.compress and self._flat[axes].size() > 1:
            channel_of(self._flat[axes].get_group())  # its first call is collective: make it where all ranks are
            module.set_custom_reduce_scatter(_Compressed(self._wire))  # type: ignore[arg-type]

    def _bind(self, held: Sequence[Held]) -> None:
        params = dict(named(self.roots))
        self._params: list[DTensor] = []
        self.owned: list[Owned] = []
        for item in held:
            param = params[item.name]
            assert isinstance(param, DTensor)
            axes = EXPERT_AXES if item.sharding.expert else DENSE_AXES
            flat: DeviceMesh = self._flat[axes]
            share = deal(self._shapes[item.name], flat.get_local_rank(), flat.size(), even=True)
            value = nn.Parameter(param.to_local().detach())
            if value.shape != share.shape(self._shapes[item.name]):
                raise MoeCommError(f"FSDP keeps {tuple(value.shape)} of {item.name}, not {share}: report this")
            self._params.append(param)
            self.owned.append(Owned(item.name, value, item.sharding, share, axes, even=True))

    def zero_grad(self) -> None:
        for param, owned in zip(self._params, self.owned, strict=True):
            param.grad = None
            owned.value.grad = None

    def reduce(self) -> None:
        """FSDP has summed over its own ranks; what is left is the sum over ranks that hold a parameter alike."""
        families: dict[tuple[str, ...], list[tuple[Owned, Tensor]]] = {}
        for param, owned in zip(self._params, self.owned, strict=True):
            self._check_storage(param, owned)
            grad = torch.zeros_like(owned.value) if param.grad is None else _local(param.grad)
            families.setdefault(owned.copied_axes, []).append((owned, grad.to(owned.value.dtype)))
        for axes, family in families.items():
            # Empty shares take part: the ranks of these groups have the same.
            sums = self._wire.sum_all([grad for _, grad in family], self._mesh.group(*axes))
            for (owned, _), total in zip(family, sums, strict=True):
                owned.value.grad = total

    def publish(self) -> None:
        """New values are in FSDP's own storage already; drop gathered copies of the old ones (after an evaluation)."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _check_storage(self, param: DTensor, owned: Owned) -> None:
        if param.to_local().data_ptr() != owned.value.data_ptr():
            raise MoeCommError(
                f"{owned.name} has moved since the model was sharded; do not call to(), half() or "
                "load_state_dict(assign=True) on a model after that"
            )


class _Compressed(Allocates):
    """FSDP's reduce-scatter with gradients travelling as bf16; has the methods that torch's ReduceScatter asks for."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts_WN = input_tensor.view(dist.get_world_size(group), -1)
        output_tensor.copy_(self._wire.scatter_sum(parts_WN, group))


def fits(held: Held) -> bool:
    """Whether FSDP can spread the parameter: it has a dimension, and elements here; experts: elements on some rank, for
    their unit must be there on all. A rank without rows of the vocabulary keeps its empty part, through which its
    backward pass reaches the others.
    """
    elements = math.prod(held.sharding.shape) if held.sharding.expert else held.param.numel()
    return held.param.dim() > 0 and elements > 0


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _blocks(root: nn.Module) -> Iterator[nn.Module]:
    for child in root.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (block for block in child.children() if any(True for _ in block.parameters()))


def _check_axes(held: Held) -> None:
    axes = EXPERT_AXES if held.sharding.expert else DENSE_AXES
    cut = [axis for axis in axes if axis not in held.sharding.sum_axes]
    if cut:
        raise ConfigError(f"{held.name} is cut over {cut}, over which FSDP would spread it; use zero1 or replicate")


def _check_apart(roots: Sequence[nn.Module]) -> None:
    seen: dict[nn.Parameter, str] = {}
    for root in roots:
        names = dict(root.named_parameters())
        for param in names.values():
            if param in seen:
                raise ConfigError(
                    f"two pipeline stages of this rank share {seen[param]}, which FSDP cannot; give each its own copy "
                    "and name both as tied"
                )
        seen.update({param: name for name, param in names.items()})
