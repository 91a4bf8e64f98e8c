"""Make the MoE blocks of a user's model expert-parallel.

A recognition is never trusted: before a block is swapped, the original and a swapped copy of it run on random tokens in
fp32, forward and backward, and must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.dispatch import Dispatcher
from moe_comm.integrations.blocks.block import BlockPlan
from moe_comm.integrations.blocks.check import check
from moe_comm.integrations.blocks.distribute import distribute
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.blocks.recognise import describe
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.overlap.options import Overlap


def swap_blocks(
    model: nn.Module,
    blocks: Sequence[tuple[FoundBlock, BlockPlan]],
    dispatchers: Mapping[int, Dispatcher],
    overlap: Overlap | None,
) -> None:
    """Check and swap the MoE blocks of a model. Collective.

    Args:
        blocks: with their plans, from ``plan_blocks``.
        dispatchers: by number of experts.

    Raises:
        UnsupportedModel: a swapped block does not compute what the original does; on every rank. The model is
            unchanged.
    """
    checked = set()
    for block, plan in blocks:
        if (kind := (_signature(block), str(plan))) not in checked:
            check(block, plan, dispatchers[block.num_experts], overlap)
            checked.add(kind)
    for block, plan in blocks:
        experts = f"{block.name}.{plan.path}.".lstrip(".")
        names = (name for name, _ in model.named_parameters() if name.startswith(f"{block.name}.".lstrip(".")))
        router = next((name for name in names if not name.startswith(experts)), "")
        path, _, key = router.rpartition(".")
        replicated = partial(replicated_parameter, model.get_submodule(path), key) if router else lambda: None
        distribute(block, plan, dispatchers[block.num_experts], overlap, replicated)


def plan_blocks(blocks: Sequence[FoundBlock]) -> list[tuple[FoundBlock, BlockPlan]]:
    """Return each block with its plan, from ``describe``. Equal blocks on meta are tried once."""
    plans: dict[object, BlockPlan] = {}
    planned = []
    for block in blocks:
        kind = _signature(block) if any(param.is_meta for param in block.block.parameters()) else id(block)
        if kind not in plans:
            plans[kind] = describe(block)
        planned.append((block, plans[kind]))
    return planned


def _signature(found: FoundBlock) -> str:
    """Return a text that is equal for blocks whose code does the same: classes, shapes and settings of all modules."""
    parts = [f"{found.path} {found.num_experts} {found.device} {_setting(found.adapter, {})}"]
    for name, module in found.block.named_modules():
        settings = {k: v for k, v in vars(module).items() if k not in _TENSORS}
        params = {
            key: (tuple(param.shape), param.dtype, param.device, param.requires_grad)
            for key, param in module.named_parameters(recurse=False)
        }
        kind = f"{type(module).__module__}.{type(module).__qualname__} {id(type(module))}"
        parts.append(f"{name} {kind} {_setting(settings, {})} {params} {list(module._buffers)}")
    return "\n".join(parts)


_TENSORS = ("_parameters", "_buffers", "_modules")
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, type(None))
DEPTH = 8
"""Levels of a configuration object that are compared. Blocks with deeper ones are checked one by one."""


def _setting(value: Any, seen: dict[int, int], depth: int = 0) -> str:
    """Return a text that is equal for equal settings: of an attribute, or of a configuration object in one."""
    if isinstance(value, _VALUES):
        return f"{value!r} {id(value) if isinstance(value, type) else ''}"
    if id(value) in seen:
        return f"<{seen[id(value)]}>"
    seen[id(value)] = len(seen)
    items: list[Any] | None = None
    if isinstance(value, dict):
        items = [item for pair in value.items() for item in pair]
    elif isinstance(value, list | tuple):
        items = list(value)
    elif isinstance(value, FunctionType):
        items = [value.__defaults__, value.__kwdefaults__, [_cell(cell) for cell in value.__closure__ or ()]]
    elif (
        type(value).__module__ != "builtins"
        and hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor)
    ):
        items = [vars(value)]
    if items is None or depth == DEPTH:
        return f"{type(value).__qualname__} {id(value)}"
    kind = value.__code__ if isinstance(value, FunctionType) else type(value)
    return f"{kind!r} {id(kind)} ({', '.join(_setting(item, seen, depth + 1) for item in items)})"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
