"""Reduce and clip the gradients of a model whose experts differ between ranks, and prepare it for DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import group_or_default
from moe_comm.errors import ConfigError, NonFiniteLoss, RankMismatch, UnsupportedModel
from moe_comm.layers.data_parallel.attach import (
    exclude_from_ddp,
    expert_modules,
    expert_parameters,
    refuse_shared_parameters,
    tensor_parallel,
)
from moe_comm.layers.data_parallel.expert_shard import is_dtensor, plain, total_norms
from moe_comm.layers.data_parallel.gradients import Reduction
from moe_comm.layers.data_parallel.mark import refuse_unknown_experts
from moe_comm.layers.data_parallel.optimizers import mark_parameter
from moe_comm.layers.data_parallel.replicas import check_before_training, check_if_due
from moe_comm.layers.parallel.collectives import gather_values, sum_values

_BUCKET_BYTES = 32 * 2**20


@torch.no_grad()
def sync_gradients(model: nn.Module, group: ProcessGroup | None = None, *, reduction: Reduction = "sum") -> None:
    """Reduce all gradients of ``model`` over the ranks that share one batch. Collective over ``group``.

    Call it after the last ``backward`` of a step, in loops without DDP or FSDP. Gradients of replicated parameters are
    summed over ``group``. Gradients of experts already cover the expert-parallel group; they are summed over the ranks
    of ``group`` with the same experts. With loss = (sum over this rank's tokens) / (tokens of all ranks), the results
    are the gradients of one process.

    Calls 1, 2, 4, 8, ... for a model also compare the weights of the ranks, see ``check_replicas``.

    Args:
        group: None: the default group. Without ``torch.distributed`` nothing happens.
        reduction: "mean" divides each gradient by the number of ranks, as DDP does, for a loss that is a mean over this
            rank's tokens.

    Raises:
        ConfigError: DDP or FSDP reduces the gradients of this model; or there is a dispatcher over several ranks whose
            experts are not known (``mark_experts``), and ``model`` has no known experts.
        RankMismatch: weights that must be equal differ between ranks, or a parameter is frozen on some of them only; on
            every rank, before gradients are reduced.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    group = group_or_default(group)
    if group is None or dist.get_world_size(group) == 1:
        return
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if wrapped or any(gradients.ddp is not None for _, _, gradients in expert_modules(model)):
        raise ConfigError(
            "DistributedDataParallel reduces gradients during backward; remove the call of sync_gradients"
        )
    if sharded := next((name for name, param in model.named_parameters() if is_dtensor(param)), None):
        raise ConfigError(f"FSDP reduces gradients during backward ({sharded}); remove the call of sync_gradients")
    refuse_unknown_experts(model)
    check_if_due(model, group)
    world = dist.get_world_size(group)
    experts, reduced = {id(param) for param in expert_parameters(model).values()}, set[int]()
    by_edp: dict[ProcessGroup | None, list[nn.Parameter]] = {}
    for _, module, gradients in expert_modules(model):
        if (copies := getattr(module, "copies", None)) is not None:
            copies.end_step()
        edp = gradients.edp_group(group)
        if gradients.audit is not None:
            gradients.audit.group = group
        # A parameter that several modules share is reduced once.
        expert_params = [p for p in module.parameters(recurse=False) if id(p) in experts and id(p) not in reduced]
        reduced |= {id(param) for param in expert_params}
        by_edp.setdefault(edp, []).extend(expert_params)
    for edp, params in by_edp.items():  # together, because single experts may have parameters of their own
        if edp is not None:
            _sum_gradients(params, edp)
        grads = [plain(param.grad) for param in params if param.grad is not None]
        if reduction == "mean" and grads:  # an empty list raises
            torch._foreach_div_(grads, world)
    sum_replicated_gradients(model, group, divide=world if reduction == "mean" else 1)


@torch.no_grad()
def sum_replicated_gradients(model: nn.Module, group: ProcessGroup | None = None, *, divide: int = 1) -> None:
    """Sum the gradients of replicated parameters, but not of experts. Collective over ``group``.

    Use it for a group that splits sequences (context parallelism) if the experts are distributed over other ranks.

    Args:
        group: None: the default group.
        divide: divisor of the sums.
    """
    group = group_or_default(group)
    if group is None or dist.get_world_size(group) == 1:
        return
    experts = {id(param) for param in expert_parameters(model).values()}
    _sum_gradients([p for p in model.parameters() if id(p) not in experts], group, divide)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of ``model`` so that their norm over all ranks is at most ``max_norm``. Collective.

    The norm is that of one process: each expert and each part of a parameter counts once. It is equal on all ranks.
    Call it after gradients are reduced. Supports models under DDP, under FSDP2 (where
    ``torch.nn.utils.clip_grad_norm_`` raises because experts and other parameters are on different meshes), and models
    split by ``swap_linears`` and ``swap_attention``.

    Args:
        norm_type: order of the p-norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        NonFiniteLoss: the norm is NaN or infinite, with ``error_if_nonfinite``; raised on all ranks, before scaling.
    """
    p = float(norm_type)
    families = _families(model)
    grads = [grad for params in families.values() for grad in _local_grads(params)]
    norms = []
    for groups, params in families.items():
        norm = _norm_of(_local_grads(params), p, next(model.parameters()).device)
        for group in groups:
            (norm,) = total_norms([norm], [group], p)
        norms.append(norm)
    total = (
        torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.zeros((), dtype=torch.float32, device="cpu")
    )
    if error_if_nonfinite and not torch.isfinite(total):
        raise NonFiniteLoss(f"the norm of the gradients is {float(total)}; no gradient was scaled")
    if grads:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)
    return total


def prepare_ddp(model: Any, *, grad_reduction: Reduction | None = None) -> Any:
    """Exclude experts and router counters from the reduction and broadcast of ``DistributedDataParallel``.

        model = DistributedDataParallel(moe_comm.prepare_ddp(model))

    ``swap_moe`` calls this for its model. A model that contains a swapped model or an ``MoELayer`` needs the call:
    without it, the first forward pass raises ``ConfigError``.

    Args:
        grad_reduction: "sum" or "mean": how DDP's communication hook reduces gradients. None detects DDP's own mean and
            torch's compression hooks; other hooks must be declared.

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: several experts modules have the same parameter.
    """
    exclude_from_ddp(model)
    for _, _, gradients in expert_modules(model):
        gradients.declared = grad_reduction
    return model


def prepare_fsdp(
    model: Any, group: ProcessGroup | None = None, *, grad_reduction: Reduction = "mean", **options: Any
) -> Any:
    """Shard the experts over the ranks with the same experts, before ``fully_shard`` shards the rest. Collective.

        moe_comm.prepare_fsdp(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    ``fully_shard`` skips modules that are sharded already. Without this call it would mix different experts, and the
    first forward pass raises ``ConfigError``.

    Args:
        group: ranks over which ``fully_shard`` shards the rest; None: the default group.
        grad_reduction: "mean", as ``fully_shard`` reduces; "sum" if you set its gradient divide factor to 1.
        options: options of ``fully_shard`` for the experts: ``mp_policy``, ``reshard_after_forward``,
            ``offload_policy``.

    Returns:
        ``model``.

    Raises:
        ConfigError: experts have slots for copies on other ranks.
        UnsupportedModel: several experts modules have the same parameter.
        RankMismatch: weights that must be equal differ between ranks; on every rank. Load or initialize the weights
            before this call, or build the model on "meta". ``skip_gradient_checks`` disables the check.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    group = group_or_default(group)
    if group is None:
        return model
    if dist.get_world_size(group) > 1:
        check_before_training(model, group)
    single: ProcessGroup | None = None
    refuse_shared_parameters(model)
    units: dict[nn.Module, DeviceMesh] = {}
    for name, module, gradients in expert_modules(model):
        if gradients.shards.listed:
            raise ConfigError(f"FSDP cannot shard the experts in a ModuleList ({name!r}); mark stacked parameters")
        if (copies := getattr(module, "copies", None)) is not None:
            copies.shard(getattr(options.get("mp_policy"), "param_dtype", None))
        edp = gradients.edp_group(group, registered=True)
        if edp is None:
            single = single or dist.new_group([dist.get_rank()], use_local_synchronization=True)
            edp = single
        gradients.freeze_empty(module)
        unit = gradients.unit or module
        if unit not in units:
            device = next(module.parameters()).device.type
            units[unit] = DeviceMesh.from_group(edp, device, mesh_dim_names=("edp",))
        gradients.prepared_for_fsdp, gradients.declared = True, grad_reduction
    for module in reversed(list(model.modules())):  # a unit may contain another one, which is sharded first
        if module not in units:
            continue
        mesh = units[module]
        fully_shard(module, mesh=mesh, **options)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(dist.get_world_size(group) if grad_reduction == "mean" else 1.0)
        # gloo has no pre-multiplied sum, so force a plain sum. With one rank this option makes torch divide twice.
        module.set_force_sum_reduction_for_comms(mesh.size() > 1)
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
    for _, module, gradients in expert_modules(model):
        for name in gradients.shards.shardings:
            mark_parameter(getattr(module, name), gradients.shards, name)
    return model


def _sum_gradients(params: list[nn.Parameter], group: ProcessGroup, divide: int = 1) -> None:
    """Sum gradients over ``group`` in buckets. A parameter is skipped if no rank has a gradient for it.

    Raises RankMismatch on all ranks if a parameter is frozen on some of them only.
    """
    if not params:
        return
    flags = [[param.requires_grad, param.requires_grad and param.grad is not None] for param in params]
    flags_N2 = torch.tensor(flags, dtype=torch.bool, device=params[0].device)
    flags_WN2 = gather_values(flags_N2, group, "finding parameters with gradients")
    trained_WN, has_grad_WN = flags_WN2.unbind(2)
    if partly := (trained_WN.any(0) & ~trained_WN.all(0)).nonzero().flatten().tolist():
        raise RankMismatch(
            f"{len(partly)} parameters require gradients on some ranks only; the first is parameter {partly[0]} of "
            f"{len(params)}, {tuple(params[partly[0]].shape)}. Freeze the same parameters on every rank"
        )
    params = [param for param, has_grad in zip(params, has_grad_WN.any(0).tolist(), strict=True) if has_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.layout != torch.strided:
            raise UnsupportedModel("sync_gradients supports dense gradients only; a parameter has a sparse gradient")
    for bucket in _buckets(plain(param.grad) for param in params):
        total = sum_values(torch.cat([grad.reshape(-1) for grad in bucket]), group)
        if divide > 1:
            total = total / divide
        parts = total.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [part.view(grad.shape) for part, grad in zip(parts, bucket, strict=True)])


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients by dtype into buckets of up to 32 MiB."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        bucket = open_buckets.setdefault(grad.dtype, [])
        bucket.append(grad)
        if sum(g.numel() for g in bucket) * grad.element_size() >= _BUCKET_BYTES:
            yield open_buckets.pop(grad.dtype)
    yield from open_buckets.values()


Groups = tuple[ProcessGroup, ...]


def _families(model: nn.Module) -> dict[Groups, list[nn.Parameter]]:
    """Group parameters by the process groups over which their norm is summed, whose ranks hold different elements.

    Experts are included even if they are not trained, as on ranks without experts: the norm is collective.
    """
    split: dict[int, Groups] = {}
    for _, module, gradients in expert_modules(model):
        split |= {id(getattr(module, name)): (gradients.shards.group,) for name in gradients.shards.shardings}
    split |= {id(param): (group,) for _, param, group in tensor_parallel(model)}
    families: dict[Groups, list[nn.Parameter]] = {}
    # torch caches meshes of DTensors by their ranks, so a parameter may have the mesh, and group, of an older model.
    meshes: dict[tuple[int, ...], ProcessGroup] = {}
    for param in model.parameters():
        if param.requires_grad or param.grad is not None or id(param) in split:
            of_mesh = [meshes.setdefault(tuple(dist.get_process_group_ranks(one)), one) for one in _mesh_groups(param)]
            families.setdefault((*of_mesh, *split.get(id(param), ())), []).append(param)
    return families


def _mesh_groups(param: Tensor) -> Groups:
    if not is_dtensor(param):
        return ()
    placed = enumerate(param.placements)
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placed if not placement.is_replicate())


def _local_grads(params: list[nn.Parameter]) -> list[Tensor]:
    grads = (param.grad for param in params if param.grad is not None)
    return [grad.to_local() if is_dtensor(grad) else plain(grad) for grad in grads]


def _norm_of(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device, dtype=torch.float32)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads, p)])
    total: Tensor = torch.linalg.vector_norm(norms, p)
    return total
