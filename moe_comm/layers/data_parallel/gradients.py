"""One convention for the gradients of expert and replicated parameters: both sums, or both means, over the ranks.

Backward computes two kinds of gradients of this rank's loss ``l_r``:

    replicated parameter    d l_r              this rank's tokens; the loop or DDP reduces it over the ranks
    expert                  d (l_0 + l_1 ..)   tokens of all ranks of the expert-parallel group, through dispatch

Ranks with the same experts (edp ranks, in different expert-parallel groups) each have a partial sum of an expert's
gradient. After reduction over all W ranks:

    sum     replicated  d (l_0 + .. + l_{W-1})       expert  sum over edp
    mean    replicated  d (l_0 + .. + l_{W-1}) / W   expert  sum over edp / W

DDP and FSDP2 compute means. Under DDP, a hook multiplies each expert gradient by edp / W, and averages it over edp when
DDP reduces. Averages are idempotent, so this is right with and without ``no_sync``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world  # no public way to the number of groups
from torch.nn.parallel import DistributedDataParallel

from moe_comm.comm.communicator import registry
from moe_comm.comm.group_setup import channel_of, communicator_of
from moe_comm.comm.header import TRAINED
from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, is_dtensor, plain
from moe_comm.layers.data_parallel.optimizers import mark_parameter, watch_steps
from moe_comm.layers.parallel.collectives import gather_values, sum_values
from moe_comm.runtime.versions import require

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.audit import Audit, SyncWarning

Reduction = Literal["sum", "mean"]
_MEANS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""DDP communication hooks of torch that average."""
_ADAPTERS = {"gate_up_proj": "adapters of input weights", "down_proj": "adapters of output weights"}
active_ddp: Callable[[], Any] = DistributedDataParallel._get_active_ddp_module
"""Returns the DistributedDataParallel whose forward pass runs, or None."""


class ExpertGradients:
    """The gradients of one experts module, in the convention of the data-parallel wrapper around it.

    Args:
        shards: the part of each parameter that this rank holds.
        replicated: returns a replicated parameter that each forward pass uses, or None.
        label: name of the layer in error messages.

    Attributes:
        replicated: as above.
        declared: the convention, if it was declared instead of detected; see ``prepare_ddp``.
        prepared_for_fsdp: ``prepare_fsdp`` has sharded the experts.
        frozen_by_fsdp: names of parameters without elements, whose gradients ``freeze_empty`` has disabled.
        left_to_caller: gradients are left unreduced; see ``leave_gradients``.
        unit: the module whose forward pass uses the parameters, if it is not the module that has them. FSDP shards the
            parameters together with it.
        audit: compares gradients before optimizer steps; None until the first forward pass.
    """

    def __init__(self, shards: ExpertShards, replicated: Callable[[], nn.Parameter | None], label: str) -> None:
        self.shards, self.label = shards, label
        self.checked = True
        self.declared: Reduction | None = None
        self.prepared_for_fsdp = False
        self.frozen_by_fsdp: set[str] = set()
        self.left_to_caller = False
        self.unit: nn.Module | None = None
        self.audit: Audit | SyncWarning | None = None
        self.replicated = replicated
        self._ddp: weakref.ref[Any] | None = None
        self._scale = 1.0
        self._audited = ""
        # By name: a weak reference to the parameter, and whether its gradient hooks are registered.
        self._hooked: dict[str, tuple[Callable[[], Any], bool]] = {}
        self._watched_replicated: Callable[[], Any] = _no_reference

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGradients:
        copied = ExpertGradients.__new__(ExpertGradients)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        copied.replicated, copied.unit = deepcopy(self.replicated, memo), deepcopy(self.unit, memo)
        copied._hooked, copied._watched_replicated = {}, _no_reference
        copied.audit, copied._ddp, copied._scale = None, None, 1.0
        return copied

    def use_shards(self, shards: ExpertShards) -> None:
        """Use parameters that are sharded in another way, or over another group."""
        self.shards, self.audit = shards, None
        self._hooked, self._watched_replicated = {}, _no_reference

    @property
    def averaged(self) -> bool:
        """Whether a wrapper averages gradients over ranks."""
        return self.declared != "sum" and (self.prepared_for_fsdp or self.ddp is not None)

    @property
    def ddp(self) -> Any:
        """The ``DistributedDataParallel`` that reduces the other gradients, or None."""
        return None if self._ddp is None else self._ddp()

    def trained(self, experts: nn.Module, routed: bool) -> int:
        """Return which parameters of ``experts`` and the router require gradients; see ``header.TRAINED``.

        The ranks compare it before rows move. If they differed, only some would take part in later collectives: in
        backward, in the comparison of gradients and in the norm of the gradients.

        Args:
            routed: whether the routing weights require gradients.
        """
        if not torch.is_grad_enabled():
            return 0
        bits = routed << TRAINED.index("routing weights")
        for bit, name in enumerate(self.shards.shardings):
            bits |= (getattr(experts, name).requires_grad or name in self.frozen_by_fsdp) << bit
        for parameter, index in _ADAPTERS.items():
            for one in getattr(experts, "adapters", {}).get(parameter, ()):  # every call runs this, mostly without any
                bits |= (one.a_ELI.requires_grad or one.b_ELO.requires_grad) << TRAINED.index(index)
        router = self.replicated()
        return bits | (router is not None and router.requires_grad) << TRAINED.index("router")

    def freeze_empty(self, experts: nn.Module) -> None:
        """Disable gradients of parameters without elements, as on a rank without experts: FSDP cannot reduce them."""
        for name in self.shards.shardings:
            param = getattr(experts, name)
            if param.requires_grad and not param.numel():
                param.requires_grad_(False)
                self.frozen_by_fsdp.add(name)

    def before_forward(self, experts: nn.Module, args: Any = None) -> None:
        """Detect which wrapper reduces gradients, and raise if it would reduce expert gradients as replicated ones.

        Raises:
            ConfigError: a wrapper treats experts as replicated; the message contains the line of code to add.
        """
        if self.prepared_for_fsdp or self.left_to_caller:
            return
        if torch.compiler.is_dynamo_compiling():
            is_traced = getattr(experts, "is_traced", None)
            if is_traced is not None and is_traced():
                return  # the operator of the layer calls this method
        self._before_forward(experts)

    @torch._disable_dynamo  # a graph break: hooks of parameters cannot be traced
    def _before_forward(self, experts: nn.Module) -> None:
        if experts._modules and adapter_fault(experts, self.label) is not None:
            return  # the layer raises it on every rank
        for name in self.shards.shardings:
            param: Any = getattr(experts, name)
            hooked_param, hooked = self._hooked.get(name, (_no_reference, False))
            same = hooked_param() is param
            if not same or (param.requires_grad and not hooked):
                self._hook(experts, name, param, hooked and same)
        replicated = self.replicated()
        # Nothing changes for a parameter that is audited.
        audited = self.audit is not None and self.audit.compares
        if replicated is not None and (not audited or self._watched_replicated() is not replicated):
            self._watch(experts, replicated)
        # Detect DDP even if gradients are disabled, as in the first forward pass of reentrant checkpointing. Its second
        # forward pass runs outside of DDP's.
        ddp = active_ddp()
        if ddp is not None and self.ddp is not ddp:
            self._follow_ddp(ddp, experts)

    def stop_checking(self) -> None:
        """Disable the comparison of gradients before optimizer steps."""
        self.checked = False
        if self.audit is not None:
            self.audit.stop()

    def edp_group(self, group: ProcessGroup, *, registered: bool = False) -> ProcessGroup | None:
        """Return the ranks of ``group`` with the same experts as this rank; None if this rank is the only one.

        The first call for a group is collective over it.

        registered: with torch.distributed, as a DeviceMesh requires. All ranks must then belong to equally many groups.
        """
        comm = communicator_of(self.shards.group)  # keeps one group for all layers: each process group starts threads
        return comm.keep(("edp", group, registered), lambda: _edp_group(self.shards.group, group, registered))

    def _hook(self, experts: nn.Module, name: str, param: Any, hooked: bool) -> None:
        if managed_by_fsdp(param):
            raise ConfigError(_fsdp_message(self.label, f"treats the experts as replicated ({name})"))
        mark_parameter(param, self.shards, name, experts)
        if param.requires_grad and not hooked:
            param.register_hook(partial(self._on_delivered, name))
            param.register_post_accumulate_grad_hook(partial(self._on_accumulated, name))
        self._hooked[name] = weakref.ref(param), hooked or param.requires_grad

    def _watch(self, experts: nn.Module, replicated: nn.Parameter) -> None:
        """Audit the first trainable parameter of ``experts`` together with ``replicated``."""
        if self._watched_replicated() is not replicated:
            if managed_by_fsdp(replicated):
                raise ConfigError(_fsdp_message(self.label, "skips the experts, but averages the other gradients"))
            self._watched_replicated, self.audit = weakref.ref(replicated), None
        if not (self.checked and torch.is_grad_enabled()):
            return
        if self.audit is not None and (self.audit.compares or not replicated.requires_grad):
            return
        ep_size = dist.get_world_size(self.shards.group)
        name = next((name for name in self.shards.shardings if getattr(experts, name).requires_grad), None)
        if name is not None and (replicated.requires_grad or ep_size < dist.get_world_size()):
            from moe_comm.layers.data_parallel.audit import Audit, SyncWarning  # inference does not need them

            expert = getattr(experts, name)
            if replicated.requires_grad:
                self.audit = Audit(self.label, self.shards.group, expert, replicated)
            else:
                self.audit = SyncWarning(self.label, ep_size, lambda: self.ddp is not None)
            self._audited = name
            if (ddp := self.ddp) is not None:
                self.audit.group = ddp.process_group
            watch_steps(expert, self.audit)

    def _on_delivered(self, name: str, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # added to ``main_grad``
            return None
        if self.audit is not None and self._audited == name:
            self.audit.expert_delivered(grad)
        return None if self._scale == 1.0 else grad * self._scale

    def _on_accumulated(self, name: str, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        ddp = self.ddp
        if ddp is not None and ddp.require_backward_grad_sync:
            edp = self.edp_group(ddp.process_group)
            if edp is not None and grad.numel():
                grad.copy_(sum_values(plain(grad), edp) / dist.get_world_size(edp))
        if not isinstance(grad, ExpertShard):
            param.grad = ExpertShard.of(grad, self.shards, name)

    def _follow_ddp(self, ddp: Any, experts: nn.Module) -> None:
        """Adopt the convention of a DDP wrapper; raise ConfigError if it is unknown or if DDP reduces experts."""
        expert_ids = {id(getattr(experts, name)) for name in self.shards.shardings}
        ignored = ddp.parameters_to_ignore
        reduced = [n for n, p in ddp.module.named_parameters() if id(p) in expert_ids and n not in ignored]
        if reduced:
            raise ConfigError(
                f"DistributedDataParallel treats the experts of layer {self.label!r} as replicated ({reduced[0]}): it "
                "has overwritten them with those of rank 0. Rebuild the model and wrap it with\n"
                "    model = DistributedDataParallel(moe_comm.prepare_ddp(model))"
            )
        group = ddp.process_group
        world = dist.get_world_size(group)
        if self.declared is None:
            names = [getattr(hook, "__name__", str(hook)) for hook, _ in getattr(ddp, "_comm_hooks", [])]
            if other := [name for name in names if name not in _MEANS]:
                raise ConfigError(
                    f"it is unknown whether DistributedDataParallel's communication hook {other[0]} sums or averages. "
                    'Declare it: moe_comm.prepare_ddp(model, grad_reduction="sum") or "mean"'
                )
        edp = self.edp_group(group)
        # DDP broadcasts all other parameters. Ranks may have different numbers of listed modules (``mark_experts``).
        if edp is not None and self.checked and not self.shards.listed:
            from moe_comm.layers.data_parallel.equal_tensors import SAME_START, compare_replicas  # only DDP needs it

            tensors = {f"{self.label}.{name}": getattr(experts, name) for name in self.shards.shardings}
            compare_replicas({edp: tensors}, channel_of(group), SAME_START)
        copies = 1 if edp is None else dist.get_world_size(edp)
        # The later average over edp is idempotent, so a repeated reduction changes nothing.
        self._scale = float(copies) if self.declared == "sum" else copies / world
        self._ddp = weakref.ref(ddp)
        if self.audit is not None:
            self.audit.group = group


def adapter_fault(experts: nn.Module, label: str) -> ConfigError | MissingDependency | None:
    """Return the error if adapters (LoRA of PEFT) or parametrizations compute parameters of ``experts``, else None."""
    if not experts._modules or not {"parametrizations", "base_layer"} & experts._modules.keys():
        return None
    if any(type(module).__module__.startswith("peft.") for module in experts.modules()):
        try:  # versions of PEFT that the integration does not support
            require("peft", "LoRA on experts")
        except (ConfigError, MissingDependency) as fault:
            return fault
    return ConfigError(
        f"layer {label!r} has adapters (LoRA) or parametrizations of its experts, which are distributed over ranks. "
        "They are not supported yet: each rank would have adapters of its own experts only, but train and save them as "
        "if they were replicated. Adapt other modules (target_modules of attention, no target_parameters of experts)"
    )


def replicated_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter of ``module``; None if it has none of this name, or a parametrization computes it."""
    return None if "parametrizations" in module._modules else getattr(module, name, None)


def _no_reference() -> None:
    """Stand in for a weak reference whose object no longer exists."""


def _edp_group(ep: ProcessGroup, group: ProcessGroup, registered: bool) -> ProcessGroup | None:
    """Return the ranks of ``group`` with this rank's position in their expert-parallel groups. Collective."""
    ranks = dist.get_process_group_ranks(ep)
    size = dist.get_world_size(group)
    if size == len(ranks) and dist.get_process_group_ranks(group) == ranks:
        return None
    own = [len(ranks), ranks[0], dist.get_rank(ep), len(_world.pg_names)]
    local_row = torch.tensor(own, dtype=torch.int64, device="cpu")
    rows = gather_values(local_row, group, "finding the ranks that hold the same experts").tolist()
    positions = {(first, place) for _, first, place, _ in rows}
    if len({count for count, *_ in rows}) > 1 or len(positions) != size or size % len(ranks):
        raise ConfigError(
            f"the {size} ranks whose gradients are reduced must be complete expert-parallel groups of one size; their "
            f"groups have {sorted({count for count, *_ in rows})} ranks"
        )
    ranks = dist.get_process_group_ranks(group)
    own_place = dist.get_rank(ep)
    members = [member for member, (_, _, place, _) in enumerate(rows) if place == own_place]
    if len(members) == 1:
        return None
    if not registered:
        return communicator_of(group).subgroup(members, registry.options.timeout_s)
    if len(counts := {count for *_, count in rows}) > 1:  # new_group would wait for ranks with other names
        raise ConfigError(
            f"torch.distributed names new groups of some ranks by the number of groups that a rank belongs to, which "
            f"differs between these ranks: {sorted(counts)}. Call dist.new_group on all ranks equally often, and "
            "use_local_synchronization=False for groups of some ranks"
        )
    edp: ProcessGroup = dist.new_group([ranks[member] for member in members], use_local_synchronization=True)
    return edp


def managed_by_fsdp(param: Any) -> bool:
    """Return whether FSDP shards ``param``, which its module may hold sharded or gathered."""
    if is_dtensor(param) or not isinstance(param, nn.Parameter) or hasattr(param, "_fsdp_flattened"):
        return True
    # During a forward pass the modules hold plain parameters; only the internal state of FSDP2 identifies them.
    from torch.distributed._composable_state import _module_state_mapping

    states = [reference() for reference in list(_module_state_mapping.values())]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    return any(getattr(p, "_unsharded_param", None) is param for group in groups for p in group.fsdp_params)


def _fsdp_message(label: str, what: str) -> str:
    return (
        f"fully_shard {what} in layer {label!r}. Call this before the first fully_shard of the model:\n"
        "    moe_comm.prepare_fsdp(model)"
    )
