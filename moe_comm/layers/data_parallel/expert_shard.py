"""Tensors that hold one rank's part of the stacked weights of all experts.

    rank 0    w13 [4, 2F, D]   experts 0..3  ┐
    rank 1    w13 [3, 2F, D]   experts 4..6  ┴  w13 [7, 2F, D]

``DTensor`` is not used because it splits a dimension as ``torch.chunk`` does and cannot describe 1 + 3 experts
(``full_tensor`` aborts the process inside gloo), because default optimizers and ``clip_grad_norm_`` reject lists that
mix it with plain tensors, and because each ``to_local`` takes 6 us. Here, parameters stay plain tensors. Only their
gradients and the values of state dicts are of this subclass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.runtime.memory import materialized
from moe_comm.topology import Box, Sharding, ShardSlice, row_range

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a ``DTensor``, without importing its module, which takes 0.5 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def like_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor that is distributed as ``like``, with the values ``local`` on this rank."""
    return type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@dataclass(frozen=True, eq=False)
class ExpertShards:
    """How the ranks of an expert-parallel group hold the parameters of one experts module.

    Attributes:
        group: ep * etp ranks, etp fastest, each with different elements.
        shardings: sharding of each parameter by its name in the module.
        place: coordinates of this rank on the axes "ep" and "etp".
        sizes: sizes of these axes.
        listed: the parameters are those of one expert of a list, which the other ranks do not have (``mark_experts``).
    """

    group: ProcessGroup
    shardings: Mapping[str, Sharding]
    place: Mapping[str, int]
    sizes: Mapping[str, int]
    listed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShards:
        return self  # copies of a model use the same groups

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of rank ``rank`` of the group."""
        return {"ep": rank // self.sizes["etp"], "etp": rank % self.sizes["etp"]}

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of parameter ``name``."""
        return self.shardings[name].local_shape(self.place, self.sizes)

    def take(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of ``full``, which contains all experts; a range of complete experts is a view."""
        boxes = self.shardings[name].boxes(self.place, self.sizes)
        if len(boxes) == 1:
            return full[boxes[0].full]
        return self.shardings[name].take(full, self.place, self.sizes)

    def gather(self, name: str, local: Tensor, *, rank0_only: bool = False, cpu: bool = False) -> Tensor | None:
        """Gather all experts of ``name`` from the ranks' parts, bit for bit. Collective over the group.

        Args:
            local: this rank's part, of any dtype; it is sent as bytes.
            rank0_only: only rank 0 of the group receives the result; other ranks return None.
            cpu: collect the result in CPU memory, one rank's part at a time.
        """
        sharding, rank, world = self.shardings[name], dist.get_rank(self.group), dist.get_world_size(self.group)
        local = local.detach().contiguous()
        receives = not rank0_only or rank == 0
        device = torch.device("cpu") if cpu else local.device
        full = local.new_empty(sharding.shape, device=device) if receives else None
        for source in range(world):
            place = self.place_of(source)
            shape = sharding.local_shape(place, self.sizes)
            if not math.prod(shape) or not (receives or source == rank):
                continue
            part = local if source == rank else local.new_empty(shape)
            self._transfer(part, source, rank, rank0_only)
            if full is not None:
                for box in sharding.boxes(place, self.sizes):
                    full[box.full] = part[box.local].to(device)
        return full

    def _transfer(self, part: Tensor, source: int, rank: int, rank0_only: bool) -> None:
        raw = materialized(part).view(-1).view(torch.uint8)
        if not rank0_only:
            dist.broadcast(raw, group=self.group, group_src=source)
        elif source != 0 and rank == source:
            dist.send(raw, group=self.group, group_dst=0)
        elif source != 0 and rank == 0:
            dist.recv(raw, group=self.group, group_src=source)


class ExpertShard(Tensor):
    """One rank's part of a tensor over all experts: a gradient, or a value of a state dict.

    It shares the storage of the plain tensor that it was created from, and computes like a plain tensor, except that:

    - A norm over all of its elements (``torch.linalg.vector_norm``, ``norm``) covers the parts of all ranks of the
    group and is collective. So ``torch.nn.utils.clip_grad_norm_`` scales by the same factor on all ranks.
    - ``torch.amp.GradScaler`` detects infinite gradients of all ranks of the group.
    - ``torch.distributed.checkpoint`` saves and loads the parts of all ranks, for any number of ranks.
    - As a value of a state dict, it cannot be saved with ``torch.save``, safetensors or pickle, which would write one
    rank's experts as if they were all experts.

    ``local()`` returns the plain tensor. Element-wise results of state-dict values are state-dict values, too.
    Results of other operations are plain tensors.
    """

    shards: ExpertShards
    name_in_module: str
    dtensor: DTensor | None
    in_state_dict: bool

    @staticmethod
    def of(local: Tensor, shards: ExpertShards, name: str, *, in_state_dict: bool = False) -> ExpertShard:
        """Return ``local`` as this rank's part of parameter ``name``; shares its storage.

        Args:
            local: the part. A ``DTensor`` if FSDP2 shards the part over the ranks that hold the same experts.
            in_state_dict: reject saving.
        """
        if isinstance(local, ExpertShard):
            return local
        dtensor = local if is_dtensor(local) else None
        values = local if dtensor is None else dtensor.to_local()
        shard: ExpertShard = values.as_subclass(ExpertShard)
        shard.shards, shard.name_in_module, shard.dtensor = shards, name, dtensor
        shard.in_state_dict = in_state_dict
        return shard

    def local(self) -> Tensor:
        """Return a plain tensor with the same storage."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def _wrap_like(self, local: Tensor) -> ExpertShard:
        if self.dtensor is not None:
            local = like_dtensor(local, self.dtensor)
        return ExpertShard.of(local, self.shards, self.name_in_module, in_state_dict=self.in_state_dict)

    @property
    def full_shape(self) -> torch.Size:
        """Shape over all experts."""
        return torch.Size(self.shards.shardings[self.name_in_module].shape)

    def full(self, **options: bool) -> Tensor | None:
        """Return all experts; see ``ExpertShards.gather``. Collective."""
        local = self.local() if self.dtensor is None else self.dtensor.full_tensor()
        return self.shards.gather(self.name_in_module, local, **options)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAVING_FUNCTIONS and getattr(args[0], "in_state_dict", False):
            _raise_unsavable(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            rule = _RULES.get(func)
            return _wrap_result(func(*args, **kwargs), args) if rule is None else rule(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.in_state_dict:
            _raise_unsavable(self)
        return self.local().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShard:
        copied = self._wrap_like(self.local().detach().clone())
        memo[id(self)] = copied
        return copied

    # torch.distributed.checkpoint calls the next four methods.

    def size(self, dim: int | None = None) -> Any:
        """Return the local size; for a value of a state dict, the size over all experts, as DCP compares it."""
        shape = self.full_shape if self.in_state_dict else self.shape
        return shape if dim is None else shape[dim]

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        sharding, local = self.shards.shardings[self.name_in_module], self.local()
        properties, size = TensorProperties.create_from_tensor(local), torch.Size(sharding.shape)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(s.start for s in box.full), torch.Size(s.stop - s.start for s in box.full))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        box = next(box for box in self._boxes() if tuple(s.start for s in box.full) == tuple(index.offset))
        return self.local()[box.local]

    def _boxes(self) -> list[Box]:
        """Return the index ranges of this rank's elements, in the local tensor and in the full one."""
        shards = self.shards
        local = self.local() if self.dtensor is None else self.dtensor
        expected = shards.local_shape(self.name_in_module)
        if tuple(local.shape) != expected:
            raise UnsupportedModel(
                f"state of shape {tuple(local.shape)} for {self.name_in_module} {expected} cannot be assembled from "
                "the parts of the ranks: the shapes must be equal"
            )
        if not self.local().numel():
            return []
        fsdp_slice = None
        if self.dtensor is not None:
            mesh, rows = self.dtensor.device_mesh, self.dtensor.shape[0]
            fsdp_slice = ShardSlice(0, row_range(rows, mesh.get_local_rank(), mesh.size()))
        return shards.shardings[self.name_in_module].boxes(shards.place, shards.sizes, fsdp_slice)


def total_norms(norms: Sequence[Tensor], groups: Sequence[ProcessGroup], p: float) -> list[Tensor]:
    """Combine this rank's p-norms over all ranks of each group. One exchange per group. Collective."""
    totals = list(norms)
    for group in dict.fromkeys(groups):
        indices = [i for i, other in enumerate(groups) if other is group]
        local = torch.stack([norms[i].detach().double().reshape(()) for i in indices])
        all_WN = gather_values(local, group, "the norm of expert gradients")
        for i, total in zip(indices, combine_norms(all_WN, p), strict=True):
            totals[i] = total.to(norms[i].dtype)
    return totals


def combine_norms(norms_WN: Tensor, p: float) -> Tensor:
    """Return the [N] p-norms of vectors from the [W, N] p-norms of their W parts."""
    if p == math.inf:
        return norms_WN.amax(0)
    if p == -math.inf:
        return norms_WN.amin(0)
    if p == 0:
        return norms_WN.sum(0)
    return norms_WN.pow(p).sum(0).pow(1 / p)


def _refuse_listed(shards: Iterable[ExpertShard]) -> None:
    """Raise ConfigError for a norm over all ranks of a parameter that other ranks do not have."""
    if (listed := next((shard for shard in shards if shard.shards.listed), None)) is not None:
        raise ConfigError(
            f"{listed.name_in_module} {tuple(listed.shape)} is a parameter of an expert in a ModuleList, which other "
            "ranks do not have, so its norm over all ranks needs one call on all ranks. Clip with "
            "moe_comm.clip_grad_norm_(model, max_norm), which returns the norm"
        )


def _norm_order(order: Any) -> float:
    return 2.0 if order in (None, "fro") else float(order)


def _norm(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard, p = args[0], _norm_order(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p")))
    if len(args) > 2 or kwargs.get("dim") is not None or not isinstance(shard, ExpertShard):
        return func(*args, **kwargs)
    _refuse_listed([shard])
    local = func(*args, **kwargs) if shard.numel() else torch.zeros((), dtype=shard.dtype, device=shard.device)
    return total_norms([local], [shard.shards.group], p)[0]


def _foreach_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors: Sequence[Tensor] = args[0]
    _refuse_listed(tensor for tensor in tensors if isinstance(tensor, ExpertShard))
    norms = list(func(*args, **kwargs))
    indices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, ExpertShard)]
    groups = [tensors[i].shards.group for i in indices]  # type: ignore[attr-defined]
    p = _norm_order(args[1] if len(args) > 1 else kwargs.get("ord"))
    for i, total in zip(indices, total_norms([norms[i] for i in indices], groups, p), strict=True):
        norms[i] = total
    return norms


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Combine ``found_inf`` over the ranks, as all ranks of a group must skip the same steps of ``GradScaler``."""
    func(*args, **kwargs)
    tensors, found_inf = args[0], args[1]
    for group in dict.fromkeys(t.shards.group for t in tensors if isinstance(t, ExpertShard)):
        found_inf.copy_(gather_values(found_inf.reshape(1), group, "infinite expert gradients").amax().reshape(()))


def _wrap_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrap copies and casts of a shard as shards."""
    result, shard = func(*args, **kwargs), args[0]
    if isinstance(shard, ExpertShard) and isinstance(result, Tensor) and result is not shard:
        return shard._wrap_like(result)
    return result


def _wrap_result(result: Any, args: tuple[Any, ...]) -> Any:
    """Wrap element-wise results of state-dict values, such as averages of state dicts, as shards."""
    if isinstance(result, ExpertShard) or not isinstance(result, Tensor):
        return result
    for arg in args:
        if isinstance(arg, ExpertShard) and arg.in_state_dict and arg.shape == result.shape:
            return arg if result is arg else arg._wrap_like(result)
    return result


# Functions that treat an ExpertShard specially. Results of all others pass through ``_wrap_result``.
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm), _norm),
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(
        (
            Tensor.detach,
            Tensor.clone,
            Tensor.contiguous,
            Tensor.to,
            Tensor.cpu,
            Tensor.cuda,
            Tensor.float,
            Tensor.double,
            Tensor.half,
            Tensor.bfloat16,
            Tensor.data.__get__,  # type: ignore[attr-defined]
            torch.clone,
            torch.detach,
        ),
        _wrap_copy,
    ),
}
# Functions through which torch.save, safetensors and numpy read the memory of a state-dict value.
_SAVING_FUNCTIONS = {Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage, Tensor.numpy}


def _raise_unsavable(shard: ExpertShard) -> NoReturn:
    shards, rank = shard.shards, dist.get_rank(shard.shards.group)
    sharding = shards.shardings[shard.name_in_module]
    raise ConfigError(
        f"this {shard.name_in_module} {tuple(shard.shape)} is the part of rank {rank} of {sharding.shape} over all "
        f"experts; saving it would lose the experts of the other {dist.get_world_size(shards.group) - 1} ranks. "
        "Save the results of moe_comm.state_dict(model) and moe_comm.optimizer_state_dict(model, optimizer), which all "
        "ranks must call, or use torch.distributed.checkpoint.save (not async_save). For one file per rank: "
        'moe_comm.state_dict(model, form="local").'
    )


def plain(value: Any) -> Any:
    """Return the plain tensor of an ``ExpertShard``, or ``value`` itself."""
    return value.local() if isinstance(value, ExpertShard) else value


def distribute_like(value: Any, like: Any) -> Any:
    """Distribute ``value``, which all ranks hold in full, over ranks as ``like`` is. Not collective."""
    if not is_dtensor(like) or not isinstance(value, Tensor) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    if value.shape != like.shape:
        raise InputError(f"a tensor has shape {tuple(value.shape)}; expected {tuple(like.shape)}")
    value = value.to(like.to_local().device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
