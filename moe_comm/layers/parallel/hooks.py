"""Keep the hooks of a module that a swap replaces, and refuse those that it would lose."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel

CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of a module that hold the hooks of its calls."""
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def take_call_hooks(new: nn.Module, old: nn.Module) -> None:
    """Let calls of ``new`` run the hooks of ``old``, which it replaces. The handles of the hooks still remove them."""
    for name in CALL_HOOKS:
        hooks = getattr(old, name)
        hooks.update(getattr(new, name))
        setattr(new, name, hooks)
    new._is_full_backward_hook = old._is_full_backward_hook


def refuse_hooks(
    call: str,
    modules: Iterable[tuple[str, nn.Module]],
    parameters: Iterable[tuple[str, Tensor]],
    *,
    calls: bool = True,
) -> None:
    """Raise UnsupportedModel if modules or parameters that ``call`` replaces have hooks.

    calls: also hooks of the modules' calls. False if they are kept.
    """
    for name, module in modules:
        if calls and any(getattr(module, hooks) for hooks in CALL_HOOKS):
            raise _refusal(call, name, "forward or backward hooks", "module")
        if any(getattr(module, hooks) for hooks in _STATE_HOOKS):
            raise _refusal(call, name, "state-dict hooks", "module")
    for name, parameter in parameters:
        if any(getattr(parameter, hooks) for hooks in _GRADIENT_HOOKS):
            raise _refusal(call, name, "gradient hooks", "parameter")


def _refusal(call: str, name: str, hooks: str, kind: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} has {hooks}, and {call} replaces this {kind}. Remove them before {call}")
