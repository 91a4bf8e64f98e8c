"""Find the MoE blocks of a user's model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.layers.moe.formula import MoEBlock
from moe_comm.layers.moe.trial import device_of

CLIMB = 3
"""Number of modules above the experts among which the block is searched."""


@dataclass(frozen=True, eq=False)
class FoundBlock:
    """A module that looks like an MoE block, or has an adapter.

    path: of the experts in the block; the place of the swapped ones.
    stacked: one module has the parameters of all experts.
    device: on which copies of the block run.
    """

    name: str
    block: nn.Module
    path: str
    num_experts: int
    stacked: bool
    device: torch.device
    adapter: MoEBlock | None = None

    @property
    def experts(self) -> Any:
        return self.block.get_submodule(self.path)


def find_blocks(
    model: nn.Module, device: torch.device, adapted: Mapping[str, MoEBlock | None], known: Collection[str] = ()
) -> list[FoundBlock]:
    """Return the modules of ``model`` that look like MoE blocks.

    device: on which copies of blocks on meta run. adapted: from ``adapted_blocks``. known: names of other MoE blocks.

    That is, several modules of a list or dict, or the slices of stacked parameters, are two or three linear layers
    each, and a module around them has a matrix with as many rows, or columns: the router. Or the class has an adapter.
    """
    described = {**dict.fromkeys(known), **adapted}
    found: list[FoundBlock] = []
    candidates: dict[str, tuple[int, bool]] = {}
    for name, module in model.named_modules():
        if (adapter := described.get(name)) is not None:
            path, stacked = _path_of(module, adapter.last), "{}" not in adapter.last
            count = adapter.formula(module).layout.num_experts
            found.append(FoundBlock(name, module, path, count, stacked, device_of(module, device), adapter))
        elif is_inside(name, [*described, *filter(None, candidates)]) or any(
            is_inside(other, [name]) for other in described
        ):
            continue
        elif (size := _list_size(module)) is not None:
            candidates[name] = size, False
        elif (size := _stack_size(module)) is not None:
            candidates[name] = size, True
    parents = {name.rpartition(".")[0] for name in candidates} | set(described)
    for name, (size, stacked) in candidates.items():
        block_name = name
        for _ in range(CLIMB):
            if not block_name:
                break
            block_name = block_name.rpartition(".")[0]
            if any(is_inside(other, [block_name]) for other in known):
                break
            # A router that is nearer to other experts is theirs.
            others = {parent for parent in parents if parent != block_name and not f"{name}.".startswith(f"{parent}.")}
            params = (
                (f"{block_name}.{key}".lstrip("."), p) for key, p in model.get_submodule(block_name).named_parameters()
            )
            own = (p.shape for key, p in params if not key.startswith((f"{name}.", *(f"{o}." for o in others if o))))
            if any(len(shape) == 2 and size in shape for shape in own):
                path, block = name[len(block_name) :].lstrip("."), model.get_submodule(block_name)
                found.append(FoundBlock(block_name, block, path, size, stacked, device_of(block, device)))
                break
    return found


def overlooked_blocks(model: nn.Module, found: Collection[FoundBlock]) -> list[str]:
    """Return the names of modules that are like a block that was found, but whose experts differ in their parameters.

    That is, of its class, with a list or dict of as many modules in the place of its experts.
    """
    places = {(type(one.block), one.path, one.num_experts) for one in found if one.adapter is None and not one.stacked}
    names = {one.name for one in found}
    overlooked = []
    for name, module in model.named_modules():
        for kind, path, count in places if name not in names else ():
            experts = dict(module.named_modules()).get(path) if type(module) is kind else None
            if isinstance(experts, nn.ModuleList | nn.ModuleDict) and len(experts) == count:
                overlooked.append(name)
    return overlooked


def _path_of(block: nn.Module, parameter: str) -> str:
    """Return where the swapped experts of a block with an adapter are: in place of the module with the parameters."""
    path = parameter.partition("{}")[0].rpartition(".")[0]
    return path or next(name for name in ("experts", "swapped_experts") if not hasattr(block, name))


def _list_size(module: nn.Module) -> int | None:
    """Return the number of experts in a list or dict of modules, or None if it holds no experts."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return None
    items = list(module.values() if isinstance(module, nn.ModuleDict) else module)
    shapes = [{name: tuple(param.shape) for name, param in item.named_parameters()} for item in items]
    same = all(type(item) is type(items[0]) for item in items) and all(of == shapes[0] for of in shapes)
    return len(items) if same and _is_expert(shapes[0].values()) else None


def _stack_size(module: nn.Module) -> int | None:
    """Return the number of experts in a module of stacked parameters, or None."""
    shapes = [tuple(param.shape) for param in module.parameters(recurse=False)]
    if not shapes or any(len(shape) not in (2, 3) for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        return None
    return shapes[0][0] if shapes[0][0] > 1 and _is_expert([shape[1:] for shape in shapes]) else None


def _is_expert(shapes: Any) -> bool:
    matrices = [shape for shape in shapes if len(shape) == 2]
    vectors = sum(len(shape) == 1 for shape in shapes)
    return len(matrices) in (2, 3) and vectors in (0, len(matrices)) and len(matrices) + vectors == len(shapes)
