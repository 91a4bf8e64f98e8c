"""Optimizer hooks for expert parameters: their state is one rank's part, and their gradients are audited.

torch calls a global hook before each step of each optimizer. The hook looks for parameters marked here, and raises if
the model no longer uses them. At the first step of an optimizer with such parameters, the hook also rejects
unsupported optimizers, and protects the state dict from being saved as if it were complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.audit import Audit
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards, is_dtensor
from moe_comm.layers.data_parallel.unsupported_optimizers import guard_averages, refuse_kind, refuse_preconditioners

_MARK = "_moe_comm_expert"
_OWNER = "_moe_comm_owner"
_AUDIT = "_moe_comm_audit"
_COPIES = "_moe_comm_copies"
_REPLACED = "_moe_comm_replaced"
_HOOKED = "_moe_comm_knows_experts"
_KIND_CHECKED, _STATE_CHECKED = "_moe_comm_checked_kind", "_moe_comm_checked_state"


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


def watch_steps(param: Tensor, audit: Audit) -> None:
    """Run ``audit`` before each step of the optimizer of ``param``."""
    setattr(param, _AUDIT, audit)


def watch_copies(param: Tensor, check: Callable[[], None]) -> None:
    """Run ``check``, which tests that gradients of copies are reduced, before each step of the optimizer of
    ``param``."""
    setattr(param, _COPIES, check)


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
        refuse_kind(optimizer)
        setattr(optimizer, _KIND_CHECKED, True)
        refuse_saving(optimizer)
    for param in marked:
        if (check := getattr(param, _COPIES, None)) is not None:
            check()
    audits = [audit for param in marked if (audit := getattr(param, _AUDIT, None)) is not None]
    # All layers of a model are reduced in the same way, so one audit is enough.
    for audit in audits[1:]:
        audit.stop()
    if audits:
        audits[0].before_step()


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
        refuse_preconditioners(optimizer, (p for p in params_of(optimizer) if mark_of(p) is not None))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
guard_averages(lambda param: mark_of(param) is not None)
