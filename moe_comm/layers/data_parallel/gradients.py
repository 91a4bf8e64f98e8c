"""One convention for the gradients of experts and of replicated parameters: both sums, or both means, over the ranks.

Backward leaves two kinds of gradients, of this rank's loss ``l_r``:

    replicated parameter    d l_r              this rank's tokens; the loop or DDP reduces it over the ranks
    expert                  d (l_0 + l_1 ..)   tokens of all ranks of the expert-parallel group: dispatch brought them

Ranks that hold the same experts (edp of them, in different expert-parallel groups) each have part of an expert's sum.
After reduction, with W ranks in all:

    sum     replicated  d (l_0 + .. + l_{W-1})       expert  sum over edp
    mean    replicated  d (l_0 + .. + l_{W-1}) / W   expert  sum over edp / W

DDP and FSDP2 take means. Under DDP, each gradient is multiplied by edp / W when backward delivers it, and averaged over
edp when DDP reduces; an average may be repeated, so this is right with and without ``no_sync``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.meeting import communicator_of
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.audit import Audit
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, is_dtensor
from moe_comm.layers.data_parallel.optimizers import mark_parameter, watch_steps
from moe_comm.layers.parallel.collectives import gather_values, sum_values

Reduction = Literal["sum", "mean"]
_MEANS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""Communication hooks of torch for DDP that average."""


class ExpertGradients:
    """The gradients of one experts module, kept in the convention of the data-parallel wrapper around it.

    Attributes:
        shards: which part of each parameter this rank holds.
        declared: the convention, where it was declared instead of detected; see ``prepare_ddp``.
        prepared_for_fsdp: ``prepare_fsdp`` has sharded the experts.
        left_to_caller: gradients stay as backward delivers them; see ``leave_gradients``.
    """

    def __init__(
        self,
        shards: ExpertShards,
        replicated: Callable[[], nn.Parameter | None],
        label: str,
    ) -> None:
        self.shards, self.label = shards, label
        self._checked = True
        self.declared: Reduction | None = None
        self.prepared_for_fsdp = False
        self.left_to_caller = False
        self.audit: Audit | None = None
        self._replicated = replicated
        self._ddp: weakref.ref[Any] | None = None
        self._scale = 1.0
        self._audited = ""
        self._seen: dict[str, tuple[Callable[[], Any], bool]] = {}
        self._seen_replicated: Callable[[], Any] = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGradients:
        copied = ExpertGradients.__new__(ExpertGradients)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        copied._replicated = deepcopy(self._replicated, memo)
        copied._seen, copied._seen_replicated = {}, _nothing
        copied.audit, copied._ddp, copied._scale = None, None, 1.0
        return copied

    @property
    def averaged(self) -> bool:
        """Whether a wrapper takes means of gradients over ranks."""
        return self.declared != "sum" and (self.prepared_for_fsdp or self.ddp is not None)

    @property
    def ddp(self) -> Any:
        """The ``DistributedDataParallel`` that reduces the other gradients; None if there is none."""
        return None if self._ddp is None else self._ddp()

    def before_forward(self, experts: nn.Module, args: Any = None) -> None:
        """Find out who reduces gradients, and raise if that would reduce those of experts as replicated ones.

        Raises:
            ConfigError: a wrapper treats experts as replicated; the message has the line to write.
        """
        if self.prepared_for_fsdp or self.left_to_caller:
            return
        for name in self.shards.shardings:
            param: Any = getattr(experts, name)
            seen, hooked = self._seen.get(name, (_nothing, False))
            same = seen() is param
            if not same or (param.requires_grad and not hooked):
                self._hook(name, param, hooked and same)
        replicated = self._replicated()
        if replicated is not None:
            self._watch(experts, replicated)
        # Without gradients, too: reentrant checkpointing runs its second forward pass outside of DDP's.
        ddp = _active_ddp()
        if ddp is not None and self.ddp is not ddp:
            self._under(ddp, experts)

    def stop_checking(self) -> None:
        """Do not compare gradients before optimizer steps."""
        self._checked = False
        if self.audit is not None:
            self.audit.stop()

    def edp_group(self, group: ProcessGroup) -> ProcessGroup | None:
        """The ranks of ``group`` that hold the same experts as this one; None if there is no other.

        The first call for a group is collective over it.
        """
        comm = communicator_of(self.shards.group)  # the layers of a model share these groups: each has threads
        return comm.keep(("edp", group), lambda: _edp_group(self.shards.group, group))

    def _hook(self, name: str, param: Any, hooked: bool) -> None:
        if managed_by_fsdp(param):
            raise ConfigError(_fsdp_line(self.label, f"treats the experts as replicated ({name})"))
        mark_parameter(param, self.shards, name)
        if param.requires_grad and not hooked:
            param.register_hook(partial(self._delivered, name))
            param.register_post_accumulate_grad_hook(partial(self._accumulated, name))
        self._seen[name] = weakref.ref(param), hooked or param.requires_grad

    def _watch(self, experts: nn.Module, replicated: nn.Parameter) -> None:
        """Compare gradients of the first trainable parameter of ``experts`` with those of ``replicated``."""
        if self._seen_replicated() is not replicated:
            if managed_by_fsdp(replicated):
                raise ConfigError(_fsdp_line(self.label, "leaves the experts alone, but averages the other gradients"))
            self._seen_replicated, self.audit = weakref.ref(replicated), None
        if self.audit is not None or not (self._checked and replicated.requires_grad and torch.is_grad_enabled()):
            return
        name = next((name for name in self.shards.shardings if getattr(experts, name).requires_grad), None)
        if name is not None:
            expert = getattr(experts, name)
            self.audit, self._audited = Audit(self.label, self.shards.group, expert, replicated), name
            if (ddp := self.ddp) is not None:
                self.audit.group = ddp.process_group
            watch_steps(expert, self.audit)

    def _delivered(self, name: str, grad: Tensor) -> Tensor | None:
        if self.audit is not None and self._audited == name:
            self.audit.expert_delivered(grad)
        return None if self._scale == 1.0 else grad * self._scale

    def _accumulated(self, name: str, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        ddp = self.ddp
        if ddp is not None and ddp.require_backward_grad_sync:
            edp = self.edp_group(ddp.process_group)
            if edp is not None:
                grad.copy_(sum_values(_plain(grad), edp) / dist.get_world_size(edp))
        if not isinstance(grad, ExpertShard):
            param.grad = ExpertShard.of(grad, self.shards, name)

    def _under(self, ddp: Any, experts: nn.Module) -> None:
        """Follow the convention of a DDP wrapper.

        Raises:
            ConfigError: it reduces expert parameters, too, or its convention is not known.
        """
        own = {id(getattr(experts, name)) for name in self.shards.shardings}
        reduced = [
            name for name, p in ddp.module.named_parameters() if id(p) in own and name not in ddp.parameters_to_ignore
        ]
        if reduced:
            raise ConfigError(
                f"DistributedDataParallel treats the experts of layer {self.label!r} as replicated ({reduced[0]}): it "
                "has overwritten them by those of rank 0. Build the model again and write\n"
                "    model = DistributedDataParallel(moe_comm.prepare_ddp(model))"
            )
        group = ddp.process_group
        world = dist.get_world_size(group)
        if self.declared is None:
            names = [getattr(hook, "__name__", str(hook)) for hook, _ in getattr(ddp, "_comm_hooks", [])]
            if other := [name for name in names if name not in _MEANS]:
                raise ConfigError(
                    f"DistributedDataParallel has the communication hook {other[0]}; whether it sums or averages is "
                    'not known. Say so: moe_comm.prepare_ddp(model, grad_reduction="sum") or "mean"'
                )
        edp = self.edp_group(group)
        copies = 1 if edp is None else dist.get_world_size(edp)
        # Averaged over edp afterwards, so that a repeated reduction changes nothing.
        self._scale = float(copies) if self.declared == "sum" else copies / world
        self._ddp = weakref.ref(ddp)
        if self.audit is not None:
            self.audit.group = group


def _nothing() -> None:
    """A reference to nothing."""


def _plain(grad: Tensor) -> Tensor:
    return grad.local() if isinstance(grad, ExpertShard) else grad


def _active_ddp() -> Any:
    """The DistributedDataParallel whose forward runs, if any."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return None if module is None else module.DistributedDataParallel._get_active_ddp_module()


def _edp_group(ep: ProcessGroup, group: ProcessGroup) -> ProcessGroup | None:
    """The group of the ranks of ``group`` with this rank's place in their expert-parallel groups. Collective.

    Raises:
        ConfigError: ``group`` does not consist of whole expert-parallel groups of one size.
    """
    ranks = dist.get_process_group_ranks(ep)
    size = dist.get_world_size(group)
    if size == len(ranks) and dist.get_process_group_ranks(group) == ranks:
        return None
    own = torch.tensor([len(ranks), ranks[0], dist.get_rank(ep)])
    found = gather_values(own, group, "finding the ranks that hold the same experts").tolist()
    whole = {(first, place) for _, first, place in found}
    if len({count for count, _, _ in found}) > 1 or len(whole) != size or size % len(ranks):
        raise ConfigError(
            f"the {size} ranks whose gradients are reduced must be whole expert-parallel groups of one size; their "
            f"groups have {sorted({count for count, _, _ in found})} ranks"
        )
    everyone = dist.get_process_group_ranks(group)
    mine = dist.get_rank(ep)
    same = [rank for rank, (_, _, place) in zip(everyone, found, strict=True) if place == mine]
    if len(same) == 1:
        return None
    made: ProcessGroup = dist.new_group(same, use_local_synchronization=True)
    return made


def managed_by_fsdp(param: Any) -> bool:
    """Whether FSDP shards ``param``, a parameter as its module holds it now, gathered or not."""
    if is_dtensor(param) or not isinstance(param, nn.Parameter) or hasattr(param, "_fsdp_flattened"):
        return True
    # During a forward pass FSDP2 puts plain parameters into the modules; only its own state tells.
    from torch.distributed._composable_state import _module_state_mapping

    states = [reference() for reference in list(_module_state_mapping.values())]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    return any(getattr(p, "_unsharded_param", None) is param for group in groups for p in group.fsdp_params)


def _fsdp_line(label: str, what: str) -> str:
    return (
        f"fully_shard {what} in layer {label!r}. Before the first fully_shard of this model write\n"
        "    moe_comm.prepare_fsdp(model)"
    )
