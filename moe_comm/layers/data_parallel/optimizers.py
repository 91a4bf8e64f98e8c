"""What optimizers need to know of expert parameters: their state is one rank's part, and gradients are checked.

torch calls a hook before each step of each optimizer. It looks for parameters marked here. The first step of an
optimizer with such parameters also makes its state dict refuse to be saved as if it were whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from moe_comm.layers.data_parallel.audit import Audit
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, ExpertShards

_MARK = "_moe_comm_expert"
_AUDIT = "_moe_comm_audit"
_KNOWN = "_moe_comm_knows_experts"


def mark_parameter(param: Tensor, shards: ExpertShards, name: str) -> None:
    """Let optimizers know that ``param`` is this rank's part of parameter ``name``."""
    setattr(param, _MARK, (shards, name))


def mark_of(param: Tensor) -> tuple[ExpertShards, str] | None:
    """What ``mark_parameter`` said of ``param``."""
    return getattr(param, _MARK, None)


def watch_steps(param: Tensor, audit: Audit) -> None:
    """Run ``audit`` before each step of the optimizer that has ``param``."""
    setattr(param, _AUDIT, audit)


def wrap_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Make each tensor in ``state``, a state dict of ``optimizer``, that is one rank's part an ``ExpertShard``."""
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
    """Wrap what ``optimizer.state_dict()`` returns, if the optimizer has expert parameters."""
    if not hasattr(optimizer, _KNOWN) and any(mark_of(param) is not None for param in params_of(optimizer)):
        optimizer.register_state_dict_post_hook(wrap_optimizer_state)
        setattr(optimizer, _KNOWN, True)


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of ``optimizer``, in the order of its state dict."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_saving(optimizer)
    audits = [audit for param in params_of(optimizer) if (audit := getattr(param, _AUDIT, None)) is not None]
    # The layers of a model are reduced in the same way: one is enough.
    for audit in audits[1:]:
        audit.stop()
    if audits:
        audits[0].before_step()


register_optimizer_step_pre_hook(_before_step)
