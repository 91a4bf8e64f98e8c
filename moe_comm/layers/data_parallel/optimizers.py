"""Optimizer hooks for expert parameters: their state is one rank's part, and their gradients are audited.

torch calls a global hook before each step of each optimizer. The hook looks for parameters marked here, and raises if
the model no longer uses them. At the first step of an optimizer with such parameters, the hook also rejects
unsupported optimizers, and protects the state dict from being saved as if it were complete. Unsupported are:

    kind                                             what a step would do to experts
    partitions or averages parameters over ranks     overwrite them with those of another rank
    statistics of a tensor: norms, preconditioners   give results that depend on the number of ranks

An optimizer of torch does not state its kind, so it is recognized by its class name and the names of its base classes,
and preconditioners of unknown classes by their shapes after the first step.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, is_dtensor
from moe_comm.lazy import after_import

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.audit import Audit, SyncWarning

_MARK = "_moe_comm_expert"
_OWNER = "_moe_comm_owner"
_AUDIT = "_moe_comm_audit"
_REPLACED = "_moe_comm_replaced"
_HOOKED = "_moe_comm_knows_experts"
_KIND_CHECKED, _STATE_CHECKED = "_moe_comm_checked_kind", "_moe_comm_checked_state"

_ACROSS_RANKS = re.compile("zeroredundancyoptimizer|postlocalsgdoptimizer|oss|distributedfused(adam|lamb)")
"""Names of classes that give each rank some of the parameters, or average them."""
_PER_TENSOR = re.compile(
    "(fused|nv|pytorch|paged|distributed|scalable)*"
    "(adafactor|adai|adalomo|adammini|adamp|amos|apollo|came|dadapt|dion|fromage|galore|kfac|kron|lamb|lambc|larc|lars|"
    "lbfgs|muon|muonwithaux|nero|normuon|novograd|prodigy|psgd|scion|sgdp|shampoo|sm3|soap|stableadamw)"
    "(sgd|adam|adamw|lion|grad|8bit|32bit|schedulefree|bigvision)*"
)
"""Names of classes whose steps depend on a statistic of the whole tensor, or of all tensors of this rank."""
_ADVICE = (
    "Train experts with an optimizer that works element by element (AdamW, Adam, SGD, Lion): give it "
    "moe_comm.layers.data_parallel.expert_parameters(model).values(), and the other parameters to this one"
)


def mark_parameter(param: Tensor, shards: ExpertShards, name: str, owner: nn.Module | None = None) -> None:
    """Mark ``param`` as this rank's part of parameter ``name``.

    owner: module that has the parameter. Optimizers raise once it has another one. None: not checked.
    """
    setattr(param, _MARK, (shards, name))
    if owner is not None:
        setattr(param, _OWNER, weakref.ref(owner))


def mark_replaced(old: Tensor, new: Tensor, name: str, call: str) -> None:
    """Make optimizers that hold ``old`` raise: ``call`` has replaced the parameter ``name`` of the model by ``new``."""
    if old is not new:
        setattr(old, _REPLACED, (name, call))


def mark_of(param: Tensor) -> tuple[ExpertShards, str] | None:
    """Return the arguments of ``mark_parameter`` for ``param``, or None."""
    return getattr(param, _MARK, None)


def watch_steps(param: Tensor, audit: Audit | SyncWarning) -> None:
    """Run ``audit`` before each step of the optimizer of ``param``."""
    setattr(param, _AUDIT, audit)


def wrap_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Wrap each tensor of an optimizer's state dict that is one rank's part as an ``ExpertShard``."""
    for index, param in enumerate(params_of(optimizer)):
        mark = mark_of(param)
        if mark is not None and index in state["state"]:
            shards, name = mark
            state["state"][index] = {
                key: ExpertShard.of(value, shards, name, in_state_dict=True)
                if isinstance(value, Tensor) and value.dim()
                else value
                for key, value in state["state"][index].items()
            }


def refuse_saving(optimizer: Optimizer) -> None:
    """Make values of ``optimizer.state_dict()`` raise when they are saved, if the optimizer has expert parameters."""
    if not hasattr(optimizer, _HOOKED) and any(mark_of(param) is not None for param in params_of(optimizer)):
        optimizer.register_state_dict_post_hook(wrap_optimizer_state)
        setattr(optimizer, _HOOKED, True)


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters of ``optimizer`` in the order of its state dict."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    marked = [param for param in params_of(optimizer) if vars(param)]
    for param in marked:
        _refuse_replaced(param)
    if not hasattr(optimizer, _KIND_CHECKED) and any(mark_of(param) is not None for param in marked):
        _refuse_kind(optimizer)
        setattr(optimizer, _KIND_CHECKED, True)
        refuse_saving(optimizer)
    audits = [audit for param in marked if (audit := getattr(param, _AUDIT, None)) is not None]
    # All layers of a model are reduced in the same way, so one audit is enough.
    chosen = next((audit for audit in audits if audit.compares), audits[0] if audits else None)
    for audit in audits:
        if audit is not chosen:
            audit.stop()
    if chosen is not None:
        chosen.before_step()


def _refuse_replaced(param: Tensor) -> None:
    """Raise ConfigError if the model has another parameter in place of ``param``."""
    replaced = getattr(param, _REPLACED, None)
    if replaced is not None:
        name, call = replaced
        raise ConfigError(
            f"this optimizer has a parameter {tuple(param.shape)} that {call} has replaced: {name} of the model is "
            f"another one, which would not be trained. Build the optimizer after {call}, and whatever else keeps "
            "parameters (schedulers, moving averages)"
        )
    owner, mark = getattr(param, _OWNER, None), mark_of(param)
    if owner is None or mark is None or is_dtensor(param) or (module := owner()) is None:
        return
    if getattr(module, mark[1], param) is not param:
        raise ConfigError(
            f"this optimizer has a parameter {mark[1]} {tuple(param.shape)} of experts that the model has replaced "
            "since, which would not be trained. Build the optimizer after load_state_dict(assign=True), fully_shard, "
            "and conversions of the model that replace parameters"
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, _KIND_CHECKED) and not hasattr(optimizer, _STATE_CHECKED):
        setattr(optimizer, _STATE_CHECKED, True)
        _refuse_preconditioners(optimizer, (p for p in params_of(optimizer) if mark_of(p) is not None))


def _refuse_kind(optimizer: Optimizer) -> None:
    """Raise ConfigError if the class of ``optimizer``, which has expert parameters, is known to be unsupported."""
    for kind in type(optimizer).__mro__:
        name = kind.__name__.lower().replace("_", "")
        if _ACROSS_RANKS.fullmatch(name):
            raise _across_ranks(f"{kind.__name__} divides")
        if _PER_TENSOR.fullmatch(name):
            raise ConfigError(
                f"{type(optimizer).__name__} computes statistics of whole tensors, but this rank has only some of the "
                f"experts of a stacked parameter: results would depend on the number of ranks. {_ADVICE}"
            )


def _refuse_preconditioners(optimizer: Optimizer, experts: Iterable[Tensor]) -> None:
    """Raise ConfigError if the state of a parameter in ``experts`` has a matrix that mixes experts, as Shampoo's."""
    for param in experts:
        for value in _tensors(optimizer.state.get(param, {})):
            if value.dim() == 2 and value.shape[0] == value.shape[1] and value.shape[0] in param.shape != value.shape:
                raise ConfigError(
                    f"the state of {type(optimizer).__name__} for experts {tuple(param.shape)} has a preconditioner "
                    f"{tuple(value.shape)} of this rank's experts: results depend on the number of ranks. {_ADVICE}"
                )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _across_ranks(what: str) -> ConfigError:
    return ConfigError(
        f"{what} parameters over ranks as if all ranks had the same, but each rank has different experts, "
        f"which would be lost. {_ADVICE}. prepare_fsdp divides the state of replicated parameters and of experts"
    )


def _guard_averages() -> None:
    """Make torch's parameter averagers raise for expert parameters.

    ``AveragedModel`` raises only if it is a copy of the model before its experts were replaced.
    """

    def before_average(_: Any, params: Iterable[Any]) -> tuple[Any, ...]:
        params = list(params)
        members = (one for item in params for one in (item["params"] if isinstance(item, dict) else (item,)))
        if any(mark_of(param) is not None for param in members):
            raise _across_ranks("a model averager averages")
        return (params,)

    def before_update(averaged: Any, model: Any) -> tuple[Any, ...]:
        for mine, param in zip(averaged.module.parameters(), model.parameters(), strict=False):
            if mark_of(param) is not None and mine.shape != param.shape:
                raise ConfigError(
                    f"this {type(averaged).__name__} has parameters {tuple(mine.shape)}, but experts of the model "
                    f"{tuple(param.shape)}: it was built before swap_moe. Build it after swap_moe"
                )
        return (model,)

    def guard_averagers() -> None:
        from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager

        for kind in (averagers.PeriodicModelAverager, hierarchical_model_averager.HierarchicalModelAverager):
            _guard(kind, "average_parameters", before_average)

    _guard(swa_utils.AveragedModel, "update_parameters", before_update)
    after_import(["torch.distributed.algorithms.model_averaging.averagers"], guard_averagers)


def _guard(kind: Any, name: str, check: Callable[..., tuple[Any, ...]]) -> None:
    original = getattr(kind, name)

    @wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *check(self, *args, **kwargs))

    setattr(kind, name, guarded)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
_guard_averages()
