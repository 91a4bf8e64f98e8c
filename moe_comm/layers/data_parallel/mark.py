"""Experts of a user's own module, over a dispatcher: gradients, norms, DDP and state dicts as for an ``MoELayer``.

    rank 0    ModuleList [e0, e1, e2]    up [3, F, D]        keys of state dicts    experts.0 .. experts.4, up [5, F, D]
    rank 1    ModuleList [e3, e4]        up [2, F, D]        the same               the same

A stacked parameter is one rank's part of [E, ...]. A module of a list belongs to one rank: it is sharded so that this
rank has all rows of its parameters, and the others have none.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import compare
from moe_comm.comm.communicator import communicators
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import ConfigError, MoeCommError, RankMismatch
from moe_comm.layers.data_parallel.attach import attach_experts, gradients_of
from moe_comm.layers.data_parallel.equal_tensors import SAME_START, compare_replicas
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards
from moe_comm.layers.data_parallel.gradients import ExpertGradients, active_ddp
from moe_comm.topology import Placement, Sharding, Split

MANY = 4
"""Modules whose hooks are checked in each dispatch."""
Shape = tuple[int, ...]
Described = dict[str, tuple[Shape, str]]
"""Shape and dtype of parameters, by name."""


def mark_experts(module: nn.Module, dispatcher: Dispatcher, *, label: str = "") -> Any:
    """Declare that ``module`` contains the experts of this rank that ``dispatcher`` sends rows to. Collective.

        experts = nn.ModuleList(MLP() for _ in dispatcher.local_experts)
        moe_comm.mark_experts(experts, dispatcher)

    Afterwards ``sync_gradients``, ``clip_grad_norm_``, ``prepare_ddp``, ``state_dict``, ``load_state_dict`` and
    ``torch.distributed.checkpoint`` treat the parameters as those of an ``MoELayer``. Call it before the optimizer is
    built, and before ``prepare_ddp``.

    Args:
        module: its parameters are in one of two forms. A ``ModuleList`` with a module per expert of this rank, in the
            order of ``dispatcher.local_experts``: state dicts have the modules of all ranks under their global ids.
            Stacked parameters [local experts, ...]: state dicts have [all experts, ...]. Submodules may have either
            form. Buffers that are in state dicts are not supported.
        dispatcher: the dispatcher of these experts. With one rank, nothing happens.
        label: name of the layer in error messages.

    Returns:
        ``module``.

    Raises:
        ConfigError: a parameter has neither form, ``module`` is already marked, the placement has room for copies of
            experts, or a rank has no module in its ``ModuleList``; on every rank.
        RankMismatch: ranks mark modules with different parameters; on every rank.

    Run every expert in each forward pass, also without rows, if DDP trains experts that several ranks hold. With
    modules in a list, clip with ``moe_comm.clip_grad_norm_``, and save the optimizer with
    ``moe_comm.optimizer_state_dict(model, optimizer, form="local")``, one file per rank.
    """
    group = dispatcher.group
    if group is None or dispatcher.world == 1:
        return module
    placement = dispatcher.expert_placement or Placement.of_layout(dispatcher.placement)
    own, found, fault = placement.homes_of(dispatcher.rank), _Found(), None
    try:
        if placement.slots_per_rank != placement.homes_per_rank:
            raise ConfigError("mark_experts does not support a placement with room for copies of experts")
        found.add(module, "", len(own))
    except ConfigError as error:
        fault = error
    by_rank = _exchange(found.description(own), group, fault)
    experts = _merge(by_rank)
    place, sizes = {"ep": dispatcher.rank, "etp": 0}, {"ep": dispatcher.world, "etp": 1}
    attached: list[nn.Module] = []
    for path, (holder, names) in found.stacks.items():
        over_ep = Split.of_experts(placement)
        shardings = {
            name: Sharding((placement.num_experts, *getattr(holder, name).shape[1:]), (over_ep,), expert=True)
            for name in names
        }
        attach_experts(holder, ExpertShards(group, shardings, place, sizes), _nothing, label or path)
        attached.append(holder)
    for path, modules in found.lists.items():
        owners = placement.homes_per_rank
        rank_of = {expert: rank for rank in range(len(owners)) for expert in placement.homes_of(rank)}
        shards_of: dict[int, dict[str, ExpertShards]] = {}
        for expert, described in sorted(experts[path].items()):
            shards_of[expert] = {
                name: _of_one_rank(name.rpartition(".")[2], shape, rank_of[expert], (group, place, sizes))
                for name, (shape, _) in described.items()
            }
        for index, expert in enumerate(own):
            attached += _attach_list_item(modules[index], shards_of[expert], label or path)
        named = _GlobalNames(own, experts[path], shards_of)
        modules.register_state_dict_post_hook(partial(named.after_state_dict))  # torch sets an attribute of the hook
        modules.register_load_state_dict_pre_hook(named.before_load)
    dispatcher.before_dispatch.append(_Watcher(attached))
    dispatcher.has_unknown_experts = False
    return module


def refuse_unknown_experts(model: nn.Module) -> None:
    """Raise ConfigError if ``model`` has no known experts, but a dispatcher over several ranks has unknown ones."""
    if any(gradients_of(module) is not None or _holds_all_experts(module) for module in model.modules()):
        return
    if _unknown_dispatchers():
        gc.collect()  # free dispatchers that only reference cycles keep alive
    if dispatchers := _unknown_dispatchers():
        largest = max(dispatchers, key=lambda dispatcher: dispatcher.num_experts)
        raise ConfigError(
            f"this process has a dispatcher of {largest.num_experts} experts over {largest.world} ranks, "
            "but it is not known which parameters belong to the experts, and those of different experts must not be "
            "summed. Declare them before the optimizer is built:\n"
            "    moe_comm.mark_experts(experts, dispatcher)\n"
            f"If this {type(model).__name__} has no experts, delete the dispatchers that have none, or reduce its "
            "gradients with torch.distributed"
        )


def _holds_all_experts(module: nn.Module) -> bool:
    return getattr(getattr(module, "dispatcher", None), "world", 0) == 1


def _unknown_dispatchers() -> list[Dispatcher]:
    users = [user for comm in communicators() for user in comm.users]
    return [user for user in users if isinstance(user, Dispatcher) and user.has_unknown_experts]


@dataclass
class _Found:
    """The parameters of a marked module: modules with stacked ones by path, and lists of modules by path."""

    stacks: dict[str, tuple[nn.Module, list[str]]] = field(default_factory=dict)
    lists: dict[str, nn.ModuleList] = field(default_factory=dict)

    def add(self, module: nn.Module, path: str, count: int) -> None:
        """Add the parameters of ``module``, which belong to ``count`` experts, or raise ConfigError."""
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                raise ConfigError(f"the buffer {_join(path, name)} is in state dicts; experts may have parameters only")
        if gradients_of(module) is not None:
            raise ConfigError(f"the experts in {path or type(module).__name__} are already marked")
        if isinstance(module, nn.ModuleList) and len(module) == count:
            self._add_list(module, path)
            return
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            shape = tuple(getattr(module, name).shape)
            if any(getattr(module, name) is getattr(*one) for one in self._stacked()):
                raise ConfigError(f"{_join(path, name)} is a parameter that is used twice")
            if shape[:1] != (count,):
                raise ConfigError(
                    f"this rank has {count} experts, but {_join(path, name)} has shape {shape}. Mark stacked "
                    f"parameters [{count}, ...], or a ModuleList of {count} modules"
                )
        if names:
            self.stacks[path] = module, names
        for name, child in module.named_children():
            self.add(child, _join(path, name), count)

    def _stacked(self) -> Iterator[tuple[nn.Module, str]]:
        return ((module, name) for module, names in self.stacks.values() for name in names)

    def _add_list(self, modules: nn.ModuleList, path: str) -> None:
        seen: set[int] = set()
        for name, part in modules.named_modules():
            for key, param in part.named_parameters(recurse=False):
                if not param.dim():
                    raise ConfigError(f"{_join(path, name, key)} is a scalar; use a parameter of shape [1]")
            for key, _ in part.named_buffers(recurse=False):
                if key not in part._non_persistent_buffers_set:
                    raise ConfigError(f"the buffer {_join(path, name, key)} is in state dicts; use parameters only")
            if gradients_of(part) is not None:
                raise ConfigError(f"{_join(path, name)} is already marked")
        for index, module in enumerate(modules):
            named = [id(param) for _, param in module.named_parameters(remove_duplicate=False)]
            if seen & {*named} or len({*named}) < len(named):
                raise ConfigError(f"module {index} of {path or 'the list'} has a parameter that is used twice")
            seen |= {*named}
        self.lists[path] = modules

    def description(self, own: tuple[int, ...]) -> str:
        """Return the description that ranks exchange, as JSON."""
        stacks = {
            _join(path, name): [list(getattr(module, name).shape[1:]), str(getattr(module, name).dtype)]
            for path, (module, names) in self.stacks.items()
            for name in names
        }
        lists = {
            path: {
                expert: {name: [list(p.shape), str(p.dtype)] for name, p in module.named_parameters()}
                for expert, module in zip(own, modules, strict=True)
            }
            for path, modules in self.lists.items()
        }
        return json.dumps({"stacks": stacks, "lists": lists})


def _exchange(text: str, group: ProcessGroup, fault: MoeCommError | None) -> list[Any]:
    """Return the descriptions of all ranks. Collective."""
    channel, raw = channel_of(group), text.encode()
    most = max(compare(channel, "mark_experts", {}, {"bytes": len(raw)}, fault)["bytes"])
    sent = F.pad(torch.frombuffer(bytearray(raw), dtype=torch.uint8), (0, most - len(raw)), value=ord(" "))
    rows = channel.all_gather(sent.to(channel.control_device), "mark_experts").cpu().numpy()
    return [json.loads(row.tobytes()) for row in rows]


def _merge(by_rank: list[Any]) -> dict[str, dict[int, Described]]:
    """Return the parameters of all experts of each list, by path and global id, after comparing the ranks."""
    stacks = [one["stacks"] for one in by_rank]
    if differing := next((rank for rank, one in enumerate(stacks) if one != stacks[0]), 0):
        raise RankMismatch(
            f"the stacked parameters of the experts are {stacks[0]} on rank 0, but {stacks[differing]} on rank "
            f"{differing} (shapes without the first dimension)"
        )
    lists = [one["lists"] for one in by_rank]
    if differing := next((rank for rank, one in enumerate(lists) if one.keys() != lists[0].keys()), 0):
        raise RankMismatch(
            f"the experts are in the lists {list(lists[0])} on rank 0, but {list(lists[differing])} on rank {differing}"
        )
    merged: dict[str, dict[int, Described]] = {}
    for rank, one in enumerate(lists):
        for path, experts in one.items():
            if not experts:
                raise ConfigError(
                    f"rank {rank} has no expert in the ModuleList {path!r}. Use stacked parameters [0, ...], or fewer "
                    "ranks"
                )
            for expert, described in experts.items():
                named = {name: (tuple(shape), dtype) for name, (shape, dtype) in described.items()}
                merged.setdefault(path, {})[int(expert)] = named
    return merged


def _of_one_rank(
    key: str, shape: Shape, owner: int, at: tuple[ProcessGroup, Mapping[str, int], Mapping[str, int]]
) -> ExpertShards:
    """Return the sharding of a parameter that rank ``owner`` has, and no other rank."""
    group, place, sizes = at
    rows = tuple(shape[0] if rank == owner else 0 for rank in range(sizes["ep"]))
    return ExpertShards(group, {key: Sharding(shape, (Split(0, "ep", sizes=rows),), expert=True)}, place, sizes, True)


def _attach_list_item(module: nn.Module, shards_of: Mapping[str, ExpertShards], label: str) -> Iterator[nn.Module]:
    """Attach the hooks to each part of one expert that has parameters of its own."""
    for name, part in module.named_modules():
        keys = [key for key, _ in part.named_parameters(recurse=False)]
        if keys:
            own = [shards_of[_join(name, key)] for key in keys]
            shardings = {key: one.shardings[key] for key, one in zip(keys, own, strict=True)}
            attach_experts(
                part, ExpertShards(own[0].group, shardings, own[0].place, own[0].sizes, True), _nothing, label
            )
            yield part


class _GlobalNames:
    """State dicts of a list of experts: the modules of all ranks under their global ids.

    The order is the same on each rank. Values of other ranks' experts are empty parts.
    """

    def __init__(
        self,
        own: tuple[int, ...],
        experts: Mapping[int, Described],
        shards_of: Mapping[int, Mapping[str, ExpertShards]],
    ) -> None:
        self._own, self._experts, self._shards_of = own, experts, shards_of

    def __deepcopy__(self, memo: dict[int, Any]) -> _GlobalNames:
        return self

    def after_state_dict(self, modules: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        local = {
            key: state.pop(key) for key in list(state) if key.startswith(prefix) and key != f"{prefix}_extra_state"
        }
        given = {name: value for key, value in local.items() for name in [key[len(prefix) :].partition(".")[2]]}
        for expert, described in sorted(self._experts.items()):
            if expert in self._own:
                index = f"{prefix}{self._own.index(expert)}."
                renamed = {k[len(index) :]: v for k, v in local.items() if k.startswith(index)}
                state.update({f"{prefix}{expert}.{name}": value for name, value in renamed.items()})
                continue
            for name, (shape, dtype) in described.items():
                like = given.get(name)
                empty = (
                    like.new_empty(0, *shape[1:])
                    if isinstance(like, Tensor)
                    else torch.empty(0, *shape[1:], dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
                )
                state[f"{prefix}{expert}.{name}"] = ExpertShard.of(
                    empty, self._shards_of[expert][name], name.rpartition(".")[2], in_state_dict=True
                )

    def before_load(self, modules: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        given = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
        for key, value in given.items():
            expert, _dot, name = key[len(prefix) :].partition(".")
            if not expert.isdecimal():
                state[key] = value
            elif int(expert) in self._own:
                state[f"{prefix}{self._own.index(int(expert))}.{name}"] = value
            elif int(expert) not in self._experts:
                state[f"{prefix}{len(self._own)}.{name}"] = value  # reported as unexpected


class _Watcher:
    """Runs the checks before a forward pass at each dispatch, which all ranks reach, also those that skip experts."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._checked = False
        self._ddp: weakref.ref[Any] | None = None

    def __call__(self) -> None:
        ddp = active_ddp()
        new_ddp = ddp is not None and (self._ddp is None or self._ddp() is not ddp)
        # If nothing is new, the hooks of the other modules run when these are called.
        count = len(self._modules) if new_ddp or not self._checked else MANY
        self._checked, marked = True, [reference() for reference in self._modules[:count]]
        parts = [(one, gradients) for one in marked if one is not None and (gradients := gradients_of(one)) is not None]
        for module, gradients in parts:
            gradients.before_forward(module)
        if new_ddp:
            self._ddp = weakref.ref(ddp)
            _compare_listed(parts, ddp.process_group)


def _compare_listed(parts: Sequence[tuple[nn.Module, ExpertGradients]], group: ProcessGroup) -> None:
    """Compare the modules of lists between the ranks of ``group`` that hold the same ones. Collective."""
    listed = [(module, gradients) for module, gradients in parts if gradients.shards.listed]
    edp = listed[0][1].edp_group(group) if listed and all(gradients.checked for _, gradients in listed) else None
    if edp is not None:
        tensors = {
            f"{gradients.label}.{index}.{name}": getattr(module, name)
            for index, (module, gradients) in enumerate(listed)
            for name in gradients.shards.shardings
        }
        compare_replicas({edp: tensors}, channel_of(group), SAME_START)


def _nothing() -> None:
    """Return no replicated parameter."""


def _join(*path: str) -> str:
    return ".".join(part for part in path if part)
