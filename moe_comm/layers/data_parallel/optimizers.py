"""Optimizer hooks for expert parameters: their state is one rank's part, and their gradients are audited.

torch calls a global hook before each step of each optimizer. The hook looks for parameters marked here. At the first
step of an optimizer with such parameters, the hook also protects its state dict from being saved as if it were
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from moe_comm.layers.data_parallel.audit import Audit
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards

_MARK = "_moe_comm_expert"
_AUDIT = "_moe_comm_audit"
_COPIES = "_moe_comm_copies"
_HOOKED = "_moe_comm_knows_experts"


def mark_parameter(param: Tensor, shards: ExpertShards, name: str) -> None:
    """Mark ``param`` as this rank's part of parameter ``name``."""
    setattr(param, _MARK, (shards, name))


def mark_of(param: Tensor) -> tuple[ExpertShards, str] | None:
    """Return the arguments of ``mark_parameter`` for ``param``, or None."""
    return getattr(param, _MARK, None)


def watch_steps(param: Tensor, audit: Audit) -> None:
    """Run ``audit`` before each step of the optimizer of ``param``."""
    setattr(param, _AUDIT, audit)


def watch_copies(param: Tensor, check: Callable[[], None]) -> None:
    """Run ``check``, whether gradients of copies are reduced, before each step of the optimizer of ``param``."""
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
    refuse_saving(optimizer)
    for param in params_of(optimizer):
        if (check := getattr(param, _COPIES, None)) is not None:
            check()
    audits = [audit for param in params_of(optimizer) if (audit := getattr(param, _AUDIT, None)) is not None]
    # All layers of a model are reduced in the same way, so one audit is enough.
    for audit in audits[1:]:
        audit.stop()
    if audits:
        audits[0].before_step()


register_optimizer_step_pre_hook(_before_step)
